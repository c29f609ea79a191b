"""Text that is safe to print: control characters of a terminal are shown as escapes."""

import re

#: C0 and C1 control characters (a terminal obeys ESC and CSI), marks that reverse the direction of
#: the text after them, separators of lines, and surrogates, which cannot be encoded.
_HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str, keep: str = "") -> str:
    r"""Return a text with its control characters as escapes: \x1b, \n, \u202e, \udcff.

    Args:     keep: control characters to leave as they are, such as "\n".
    """

    def escaped(found: re.Match[str]) -> str:
        character = found[0]
        return character if character in keep else character.encode("unicode_escape").decode()

    return _HIDDEN.sub(escaped, text)
