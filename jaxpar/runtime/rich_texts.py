"""Shows control characters of the texts in rich's tables and lines as escapes."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from jaxpar.config.printable import printable


class EscapeTexts(RenderHook):
    """A hook of a console that escapes what the console is asked to print."""

    def process_renderables(self, renderables: Sequence[ConsoleRenderable]) -> list:
        """Return the renderables with their texts escaped."""
        return [_Escaped(renderable) for renderable in renderables]


class _Escaped:
    def __init__(self, inner: ConsoleRenderable):
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            # rich's own sequences are in segments of control codes.
            yield (
                segment
                if segment.control
                else Segment(printable(segment.text, "\n\t"), segment.style)
            )
