"""Read a command line into a dataclass of options with tyro; a mistake is one line."""

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called, require_unicode
from jaxpar.runtime.terminal import drawing

#: Parts of tyro's errors that repeat --help.
_HELP = ("For full helptext", "Argument helptext")


def read_options[T](kind: type[T], argv: Sequence[str], prog: str, doc: str | None) -> T:
    """Return the options of a command line. `--help` prints the help and exits.

    Args:     kind: a dataclass. prog: the program, as in `python -m jaxpar.sample`. doc: for
              --help.
    Raises:   ConfigError for an unknown or missing option, or a value of the wrong type.
    """
    prog, about = as_called(prog), as_called(doc or "")
    parse = lambda: tyro.cli(kind, args=list(argv), prog=prog, description=about)  # noqa: E731
    return _parsed(parse, argv, prog)


def read_command(
    kinds: Mapping[str, Callable[..., Any]],
    argv: Sequence[str],
    prog: str,
    doc: str | None,
    config: Sequence[Any] = (),
) -> Any:
    """Return the options of a command line whose first argument names one of several commands.

    Args:     kinds: the dataclass of each command. config: markers of tyro. Others as
              `read_options`.
    Raises:   ConfigError as `read_options`.
    """
    told: dict[str, Any] = {"prog": as_called(prog), "description": as_called(doc or "")}
    told["config"] = tuple(config) or None
    read = tyro.extras.subcommand_cli_from_dict
    return _parsed(lambda: read(dict(kinds), args=list(argv), **told), argv, told["prog"])


def _parsed[T](parse: Callable[[], T], argv: Sequence[str], prog: str) -> T:
    require_unicode(argv)
    out, box = io.StringIO(), io.StringIO()
    try:
        # tyro draws plain text unless stdout is a terminal.
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(box):
            return parse()
    except SystemExit as stop:
        if stop.code:
            rule = _in_a_line(box.getvalue())
            raise ConfigError("command line", prog, rule, "see --help") from None
    with drawing():
        return parse()  # prints the help, and exits


def _in_a_line(box: str) -> str:
    """Return the text of tyro's box: a title and parts, separated by rules of dashes."""
    title, *parts = (part.split("\n") for part in re.split(r"^ *-{8,} *$", box, flags=re.MULTILINE))
    texts = []
    for lines in parts:
        lines = [line.strip() for line in lines if line.strip()]
        if lines and lines[0].startswith("Perhaps"):
            lines = lines[:2]  # the rest is help
        if lines and not lines[0].startswith(_HELP):
            texts.append(" ".join(lines).removesuffix("."))
    return "; ".join(texts) or " ".join(" ".join(title).split())
