"""Output streams that show control characters as escapes, and warnings.

Names of tensors, paths and options may come from a stranger. A terminal would obey the escape
sequences in them: move the cursor, hide text, or set its title. `run_program` therefore replaces
both standard streams, so that every `print` is safe. What draws with escape sequences itself uses
`console` (rich) or `drawing` (other libraries).
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from jaxpar.config.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult


def warn(text: str) -> None:
    """Print a warning to standard error."""
    print(f"WARNING    {text}", file=sys.stderr, flush=True)


#: Layout of ordinary output. Progress bars return to the start of their line with \r.
_LAYOUT = "\n\t\r"


class SafeStream:
    """A text stream that shows control characters as escapes."""

    def __init__(self, stream: TextIO):
        self.unescaped = stream

    def write(self, text: str) -> int:
        """Write a text. Returns its length."""
        self.unescaped.write(printable(text, _LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


def _unescaped(stream: TextIO) -> TextIO:
    return getattr(stream, "unescaped", stream)


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Replace the standard streams by safe ones."""
    with (
        contextlib.redirect_stdout(SafeStream(sys.stdout)),
        contextlib.redirect_stderr(SafeStream(sys.stderr)),
    ):
        yield


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Let a library draw with escape sequences. Pass it no text of strangers."""
    with (
        contextlib.redirect_stdout(_unescaped(sys.stdout)),
        contextlib.redirect_stderr(_unescaped(sys.stderr)),
    ):
        yield


def console(*, stderr: bool = False, **options: Any) -> "Console":
    """Make a rich console, which draws, and shows control characters of texts as escapes."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "unescaped"):  # a safe stream, or one that wraps it
        options["file"] = stream.unescaped
    if "JPY_PARENT_PID" in os.environ and not stream.isatty():
        # A notebook: plain lines, and no bar, each of which rich would show as HTML.
        options |= {"force_jupyter": False, "force_terminal": False}
    made = Console(stderr=stderr, **options)
    made.push_render_hook(cast(Any, EscapeTexts()))
    return made


def write_generated(text: str) -> None:
    """Write a model's text to stdout: with escapes on a terminal, unchanged to a file or a pipe."""
    stream = _unescaped(sys.stdout)
    stream.write(printable(text, "\n\t") if stream.isatty() else text)
    stream.flush()


class EscapeTexts:
    """A `RenderHook` of a console that escapes what the console is asked to print."""

    def process_renderables(self, renderables: "Sequence[ConsoleRenderable]") -> list:
        """Return the renderables with their texts escaped."""
        return [_Escaped(renderable) for renderable in renderables]


class _Escaped:
    def __init__(self, inner: "ConsoleRenderable"):
        self.inner = inner

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment

        for segment in console.render(self.inner, options):
            # rich's own sequences are in segments of control codes.
            text = segment.text if segment.control else printable(segment.text, "\n\t")
            yield Segment(text, segment.style, segment.control)
