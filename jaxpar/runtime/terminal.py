"""Output streams that show control characters as escapes, and warnings.

Names of tensors, paths and options may come from a stranger. A terminal would obey the escape
sequences in them: move the cursor, hide text, or set its title. `run_program` therefore replaces
both standard streams, so that every `print` is safe. What draws with escape sequences itself uses
`console` (rich) or `drawing` (other libraries).

rich is imported only where the output is a terminal. It honors NO_COLOR.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, cast

from jaxpar.config.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult


def say(text: str, *, stderr: bool = False) -> None:
    """Print a text: with colors on a terminal, and plain elsewhere."""
    stream = sys.stderr if stderr else sys.stdout
    if is_terminal(stream):
        shown = screen() or console(stderr=stderr)
        shown.print(text, markup=False, soft_wrap=True)
    else:
        print(text, file=stream, flush=True)


def warn(text: str) -> None:
    """Print a warning to standard error."""
    say(f"WARNING    {text}", stderr=True)


def is_terminal(*streams: Any) -> bool:
    """Return whether streams are terminals that obey escape sequences."""
    return os.environ.get("TERM") != "dumb" and all(one.isatty() for one in streams)


def screen() -> "Console | None":
    """Return the console for a live line. None: standard output or error is no terminal."""
    return _screen() if is_terminal(sys.stdout, sys.stderr) else None


@functools.cache
def _screen() -> "Console":
    # Only one: rich draws the live lines of a console together.
    return console(soft_wrap=True, file=_Drawn("stdout", above=False))


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
    stream = getattr(stream, "rich_proxied_file", stream)  # rich's, while it draws a live line
    return getattr(stream, "unescaped", stream)


class _Drawn:
    """Standard output or error, as it is when it is used, without escapes."""

    def __init__(self, name: str, above: bool):
        """Args:     above: while a live line is drawn, write above it."""
        self._name, self._above = name, above

    def __getattr__(self, name: str) -> Any:
        stream = getattr(sys, self._name)
        live = self._above and hasattr(stream, "rich_proxied_file")
        return getattr(stream if live else _unescaped(stream), name)


#: What is shown in color, and how.
WORDS = (
    r"(?m)^(?P<warning>WARNING)\b",
    r"(?m)^(?P<error>(config )?error:|bad numerics:)",
    r"(?P<fix>\bFix:)",
    r"(?m)^(?P<label>[a-z-]{3,10})(?= {2})",
    r"(?m)^(?P<step>step +[\d,]+/[\d,]+)",
    r"(?P<loss>\bloss [\d.]+)",
)
STYLES = {
    "warning": "bold yellow",
    "error": "bold red",
    "fix": "bold green",
    "label": "cyan",
    "step": "cyan",
    "loss": "bold",
}


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


def console(*, stderr: bool = False, **more: Any) -> "Console":
    """Make a rich console, which draws, and shows control characters of texts as escapes."""
    from rich.console import Console
    from rich.highlighter import RegexHighlighter
    from rich.theme import Theme

    class Words(RegexHighlighter):
        base_style = "jaxpar."
        highlights: ClassVar = [*WORDS]

    name = "stderr" if stderr else "stdout"
    options: dict[str, Any] = {"file": _Drawn(name, above=True), "highlighter": Words()}
    if "JPY_PARENT_PID" in os.environ and not getattr(sys, name).isatty():
        # A notebook: plain lines, which rich would show as HTML.
        options |= {"force_jupyter": False, "force_terminal": False}
    theme = Theme({f"jaxpar.{word}": style for word, style in STYLES.items()})
    made = Console(stderr=stderr, theme=theme, emoji=False, **(options | more))
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
