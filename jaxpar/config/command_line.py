"""A config from the command line: a file, then typed overrides of any field.

Values are read here, so that whatever is wrong with one is said like any other config error, and
`None` and the fields of an optional section can be given; tyro writes the help.
"""

import contextlib
import importlib.util
import itertools
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from jaxpar.config import Config, ConfigError, RopeScaling, default_of, flag, replace
from jaxpar.config.fields import field_types, leaf_paths, unknown_field
from jaxpar.config.serialize import to_json
from jaxpar.config.type_check import check_types
from jaxpar.config.validate import check

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def read_config(argv: Sequence[str], prog: str, doc: str | None) -> Config:
    """The config that a command line `CONFIG [--section.field value ...]` asks for, checked.

    `--help` documents every field, with CONFIG's values when it is given; `--print-config` prints
    the config as JSON; both exit.

    Raises:   ConfigError for an unknown config or field, and all that `validate.check` finds.
    """
    args, program = list(argv), f"python -m {prog}"
    name = args.pop(0) if args and not args[0].startswith("-") else None
    if name is None and not asks_help(args):
        fix = f"start with a .py file or one of {known_configs()}: {program} quickstart"
        raise ConfigError("CONFIG", args[0] if args else "", "is missing", fix)
    print_config = "--print-config" in args
    args = [arg for arg in args if arg != "--print-config"]
    doc = f"{doc}\nCONFIG is a .py file, or one of {known_configs()}. --print-config shows it."
    cfg = parse_overrides(load_config(name) if name else Config(), args, f"{program} CONFIG", doc)
    check(cfg)
    if print_config:
        print(to_json(cfg), end="")
        sys.exit(0)
    return cfg


def known_configs() -> str:
    """Names of the configs that come with the repository."""
    return ", ".join(sorted(path.stem for path in CONFIGS.glob("*.py")))


def load_config(name: str) -> Config:
    """The config of `configs/NAME.py`, or of the Python file at a path.

    A config file is code: it is imported and its `get_config()` is called. Run only your own.

    Raises:   ConfigError when there is no such file, it fails, or its get_config() returns no
              Config.
    """
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        fix = f"give a .py file, or one of {known_configs()}"
        raise ConfigError("CONFIG", name, "is no config file", fix)
    spec = importlib.util.spec_from_file_location(f"jaxpar_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _told_where(name, path):
        spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError("CONFIG", name, "has no get_config()", "see configs/quickstart.py")
    with _told_where(name, path):
        cfg = module.get_config()
    if not isinstance(cfg, Config):
        rule = f"must return a Config from get_config(), not a {type(cfg).__name__}"
        raise ConfigError("CONFIG", name, rule, "see configs/quickstart.py")
    return cfg


@contextlib.contextmanager
def _told_where(name: str, path: Path) -> Iterator[None]:
    """What a config file's code raises becomes a ConfigError that names the line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line, said = error.lineno, error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(path)]
            line, said = lines[-1] if lines else None, str(error)
        where = f"line {line} of it" if line else "it"
        rule = f"cannot be used: {where} fails: {type(error).__name__}: {' '.join(said.split())}"
        fix = f"mend {where}; configs/quickstart.py is one that works"
        raise ConfigError("CONFIG", name, rule, fix) from error


def parse_overrides(cfg: Config, args: Sequence[str], prog: str, description: str = "") -> Config:
    """The config with `--section.field value` applied; `--help` documents every field and exits.

    Raises:   ConfigError for an unknown field, a value that is missing or of the wrong type.
    """
    if asks_help(args):
        print_help(cfg, prog, description)
        sys.exit(0)
    for path, text in _pairs(args):
        cfg = replace(cfg, **{path: _read(text, field_types()[path])})
        check_types(cfg)
    return cfg


def asks_help(args: Sequence[str]) -> bool:
    """Whether a command line holds --help."""
    return "--help" in args or "-h" in args


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


def print_help(cfg: Config, prog: str, description: str) -> None:
    """Every field: its flag, type, meaning and value in `cfg`; inside a None, once that is set."""
    import tyro

    description += "\n--set SECTION.FIELD=VALUE ... sets several fields."
    if cfg.model.rope_scaling is None:
        cfg = replace(cfg, **{"model.rope_scaling": RopeScaling()})
        description += "\nmodel.rope_scaling is None here; setting one of its fields turns it on."
    else:
        description += "\n--model.rope-scaling None turns it off."
    tyro.cli(
        Config,
        default=cfg,
        args=["--help"],
        prog=prog,
        description=description,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )
