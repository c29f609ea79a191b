"""A config from the command line: its name, file or run, then typed overrides of any field.

Values are read here, so that whatever is wrong with one is a config error like any other, and
`None` and the fields of an optional section can be given.
"""

import itertools
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from jaxpar.config import Config, ConfigError, default_of, flag, replace
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.config.fields import field_types, leaf_paths, unknown_field
from jaxpar.config.help import asks_help, print_help, topic_of
from jaxpar.config.serialize import to_json
from jaxpar.config.type_check import check_types
from jaxpar.config.validate import check


def read_config(argv: Sequence[str], prog: str, doc: str | None) -> Config:
    """The config that a command line `CONFIG [--section.field value ...]` asks for, checked.

    `--help` shows how to call the program, `--help SECTION` fields of the config, with CONFIG's
    values when it is given; `--print-config` prints the config as JSON; all of them exit.

    Args:     prog: the program's module, such as "jaxpar.train".
    Raises:   ConfigError for an unknown config or field, and all that `validate.check` finds.
    """
    args, program = list(argv), as_called(f"python -m {prog}")
    name = args.pop(0) if args and not args[0].startswith("-") else None
    if name is None and not asks_help(args):
        known = f"{known_configs()}, a .py file, or the folder of a run"
        fix = f"start with one of {known}: {program} quickstart"
        raise ConfigError("CONFIG", args[0] if args else "", "is missing", fix)
    base = load_config(name) if name else Config()
    if asks_help(args):
        about = f"{as_called(doc or '').strip()}\n\n{ABOUT_CONFIG.format(known=known_configs())}"
        print_help(base, f"{program} CONFIG", about, topic_of(args), PRINT_CONFIG)
        sys.exit(0)
    print_config = "--print-config" in args
    cfg = parse_overrides(base, [arg for arg in args if arg != "--print-config"], program)
    check(cfg)
    if print_config:
        print(to_json(cfg), end="")
        sys.exit(0)
    return cfg


#: What CONFIG may be, for --help.
ABOUT_CONFIG = """\
CONFIG is one of
  {known},
a .py file with a get_config(), or the folder of a run, to start it again with its latest config."""

#: A line of --help.
PRINT_CONFIG = "--print-config                  print the config as JSON and exit"


def as_called(text: str) -> str:
    """A text that names programs as `python -m jaxpar.NAME`, with the words that are in use.

    The command `jaxpar` (jaxpar/__main__.py) leaves them in sys.argv[0], such as "jaxpar train".
    """
    called = sys.argv[0].rpartition(" ")[0]
    if called not in ("jaxpar", "python -m jaxpar"):
        return text
    return re.sub(r"python -m jaxpar\.(\w+)\b(?!\.\w)", rf"{called} \1", text)


def parse_overrides(cfg: Config, args: Sequence[str], prog: str, description: str = "") -> Config:
    """The config with `--section.field value` applied; `--help [SECTION]` prints help and exits.

    Raises:   ConfigError for an unknown field, a value that is missing or of the wrong type.
    """
    if asks_help(args):
        print_help(cfg, prog, as_called(description).strip(), topic_of(args))
        sys.exit(0)
    for path, text in _pairs(args):
        cfg = replace(cfg, **{path: _read(text, field_types()[path])})
        check_types(cfg)
    return cfg


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(path, text) for each `--section.field text`, also with "=", and also after `--set`."""
    rest = iter(expand_set_options(args))
    for arg in rest:
        name, given, text = arg.removeprefix("--").partition("=")
        path = name.replace("-", "_")
        if not arg.startswith("--"):
            raise ConfigError("command line", arg, "is not --section.field value", "see --help")
        if not given:
            text = next(rest, "--")
        missing = not given and text.startswith("--")
        if path not in field_types():
            raise unknown_field(path, "" if missing else text, flag)
        if missing:
            leaf = next(leaf for leaf in leaf_paths() if leaf.startswith(path))
            raise ConfigError(path, "", "needs a value", f"use {flag(leaf, default_of(leaf))}")
        yield path, text


def expand_set_options(args: Sequence[str]) -> Iterator[str]:
    """The arguments, with `--set section.field=text ...` as `--section.field=text` each.

    Raises:   ConfigError for anything else after --set, or nothing.
    """
    setting = False
    for arg, following in itertools.zip_longest(args, args[1:], fillvalue="--"):
        if arg.startswith("--set="):
            raise _no_setting(arg.removeprefix("--"))
        if not arg.startswith("--"):
            if setting and "=" not in arg:
                raise _no_setting(arg)
            yield f"--{arg}" if setting else arg
            continue
        setting = arg == "--set"
        if setting and following.startswith("--"):
            raise _no_setting("")
        if not setting:
            yield arg


def _no_setting(text: str) -> ConfigError:
    return ConfigError("--set", text, "is not SECTION.FIELD=VALUE", "use --set train.num-steps=100")


_WORDS = {"true": True, "false": False}


#: How text becomes a value of each type that a field can have.
_READERS: Mapping[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: lambda text: _WORDS[text.lower()],
    NoneType: lambda text: {"none": None}[text.lower()],
}


def _read(text: str, hint: Any) -> Any:
    """The text as a value of a field's type; as it is when it is none, for `check_types`."""
    for option in typing.get_args(hint) or (hint,):  # the members of a union or a Literal
        if option not in _READERS and str(option) == text:
            return option
        try:
            return _READERS[option](text)
        except (KeyError, ValueError):
            continue
    return text
