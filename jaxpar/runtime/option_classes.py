"""Reads a command line as a dataclass of options, with errors of one line.

The fields of the dataclass are the options. A whole number is annotated with the `Range` that it
must be in:

    max_tokens: Annotated[int, Range(1, 1 << 20, 200)] = 200
"""

import contextlib
import dataclasses
import io
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called, require_unicode
from jaxpar.config.numerals import number, whole_number
from jaxpar.config.rules.limits import Range
from jaxpar.config.rules.paths import is_address, normalized, refuse_address
from jaxpar.runtime.options import check_range
from jaxpar.runtime.terminal import drawing

#: Options that hold a path, beside all positional arguments. Others may hold a text, such as a
#: prompt, which can be an address.
PATHS = {"data", "include_path", "input", "json", "output", "plot"}

#: Marks an argument that may also be the address of a run in an object store
#: (`stores.reading.with_local_runs`).
OR_ADDRESS = "or the address of a run"

#: Marks an argument that may also be another address: of a folder to write, or a published model.
TO_ADDRESS = "or another address"

_READERS = tyro.constructors.ConstructorRegistry()


def read_options(
    form: type, argv: Sequence[str], program: str, doc: str | None, **more: Any
) -> Any:
    """Read a command line as an instance of a dataclass. `--help` prints the help and exits.

    Args:     program: its module, such as "jaxpar.sample". doc: for --help. more: arguments of
              `tyro.cli`.
    Raises:   ConfigError for an unknown or missing option, or a value that is not of the option's
              type or not in its `Range`.
    """
    return _read(lambda told: tyro.cli(form, **told), argv, program, doc, **more)


def read_subcommand(
    forms: Mapping[str, Any], argv: Sequence[str], program: str, doc: str | None, **more: Any
) -> Any:
    """Read `SUBCOMMAND options`, as `read_options`.

    Args:     forms: the dataclass of each subcommand, by its name.
    """
    read = tyro.extras.subcommand_cli_from_dict
    return _read(lambda told: read(dict(forms), **told), argv, program, doc, **more)


def _read(
    read: Callable[[dict[str, Any]], Any],
    argv: Sequence[str],
    program: str,
    doc: str | None,
    **more: Any,
) -> Any:
    require_unicode(argv)
    prog = as_called(f"python -m {program}")
    told = {"prog": prog, "description": as_called(doc or ""), "args": list(argv)}
    errors = io.StringIO()
    try:
        # tyro draws with escape sequences if stdout is a terminal: errors are read without them.
        plain = contextlib.redirect_stdout(io.StringIO())
        with _READERS, plain, contextlib.redirect_stderr(errors):
            options = read(told | more)
    except SystemExit as stop:
        if stop.code in (0, None):
            with _READERS, drawing():
                read(told | more)  # prints the help, and exits
        fix = f"see {prog} --help"
        raise ConfigError("command line", " ".join(argv), _reason(errors.getvalue()), fix) from None
    options = with_paths(options)
    check_ranges(options)
    return options


def _reason(box: str) -> str:
    """Return the reason that tyro prints in a box, as one line without the help below it."""
    inside = (line.strip("│ ") for line in box.splitlines()[1:])  # the first has the title
    is_rule = lambda line: not line.strip("─-")  # noqa: E731
    above_help = itertools.takewhile(lambda x: not is_rule(x), itertools.dropwhile(is_rule, inside))
    return " ".join(" ".join(above_help).split()).rstrip(".") or "cannot be read"


def with_paths[T](options: T) -> T:
    """Return a dataclass of options with `normalized` paths.

    Raises:   ConfigError that names an argument or option that must be a path, and is an address,
              such as s3://bucket/run.
    """
    asked: Any = options
    changed: dict[str, Any] = {}
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(asked):
        about = getattr(hints[field.name], "__metadata__", ())
        metavar = next((word for one in about if (word := getattr(one, "metavar", None))), None)
        positional = any(one is tyro.conf.Positional for one in about)
        if not positional and field.name not in PATHS:
            continue
        option = "--" + field.name.replace("_", "-")
        name = (metavar or field.name.upper()).strip("[ ").split()[0] if positional else option
        value = getattr(asked, field.name)
        texts = value if isinstance(value, tuple) else (value,)
        for text in texts:
            may_be = OR_ADDRESS in about or TO_ADDRESS in about
            if isinstance(text, str) and not (may_be and is_address(text)):
                refuse_address(name, text, "use a path on this host")
        made = tuple(normalized(one) if isinstance(one, str) else one for one in texts)
        if made != texts:
            changed[field.name] = made if isinstance(value, tuple) else made[0]
    return dataclasses.replace(asked, **changed) if changed else options


def check_ranges(options: Any) -> None:
    """Check that the whole numbers of a dataclass of options are in their ranges.

    Raises:   ConfigError that names the option.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value)
        for limits in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(limits, Range) and isinstance(value, int):
                check_range("--" + field.name.replace("_", "-"), value, limits)


@_READERS.primitive_rule
def _numbers(asked: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Read whole and other numbers as `config/numerals.py` does."""
    readers: dict[Any, Callable[[str], Any]] = {int: whole_number, float: number}
    if asked.type not in readers:
        return None
    reader = readers[asked.type]
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=asked.type.__name__.upper(),
        instance_from_str=lambda texts: reader(texts[0]),
        is_instance=lambda value: isinstance(value, asked.type),
        str_from_instance=lambda value: [str(value)],
    )
