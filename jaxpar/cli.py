"""The command line shared by the programs: a config file, then typed overrides of any field."""

import dataclasses
import difflib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from jaxpar import guard
from jaxpar.config import Config, ConfigError, to_json

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def read_config(argv: Sequence[str], prog: str, doc: str | None) -> Config:
    """The config that a command line `CONFIG [--section.field value ...]` asks for.

    `--help` documents every field, with CONFIG's values when it is given; `--print-config` prints
    the config as JSON; both exit.

    Raises:   ConfigError for an unknown config or field.
    """
    args = list(argv)
    name = args.pop(0) if args and not args[0].startswith("-") else None
    asks_help = "--help" in args or "-h" in args
    if name is None and not asks_help:
        raise ConfigError("CONFIG", "", "is missing", f"give a .py file, or one of {known_configs()}")
    print_config = "--print-config" in args
    args = [arg for arg in args if arg != "--print-config"]
    doc = f"{doc}\nCONFIG is a .py file, or one of {known_configs()}. --print-config shows it."
    cfg = parse_overrides(load_config(name) if name else Config(), args, f"{prog} CONFIG", doc)
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

    Raises:   ConfigError when there is no such file or it has no get_config().
    """
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        fix = f"give a .py file, or one of {known_configs()}"
        raise ConfigError("CONFIG", name, "is no config file", fix)
    spec = importlib.util.spec_from_file_location(f"jaxpar_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError("CONFIG", name, "has no get_config()", "see configs/quickstart.py")
    return module.get_config()


def parse_overrides(cfg: Config, args: Sequence[str], prog: str, description: str = "") -> Config:
    """The config with `--section.field value` applied; `--help` documents every field.

    Raises:   ConfigError for an unknown field; exits with 2 on a value of the wrong type.
    """
    parsed, unknown = tyro.cli(
        Config,
        default=cfg,
        args=list(args),
        prog=prog,
        description=description,
        return_unknown_args=True,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )
    if unknown:
        _refuse_unknown(unknown, cfg)
    return parsed


def _refuse_unknown(unknown: Sequence[str], cfg: Config) -> NoReturn:
    name = unknown[0].lstrip("-").split("=")[0]
    value = unknown[0].partition("=")[2] or (unknown[1] if len(unknown) > 1 else "")
    known = field_paths(cfg)
    path = name.replace("-", "_")
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    fix = f"did you mean --{near[0].replace('_', '-')}?" if near else "see --help"
    raise ConfigError(name, value, "is not a field of the config", fix)


def field_paths(node: Any, prefix: str = "") -> list[str]:
    """Every leaf field of a config section, by path."""
    paths: list[str] = []
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        path = prefix + field.name
        paths += field_paths(value, path + ".") if dataclasses.is_dataclass(value) else [path]
    return paths


def run_program(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run a program's main on the command line, and end with its exit code.

    A ConfigError becomes one line and code 2; other exceptions are shown whole. The process ends
    without Python's exit hooks: JAX would wait there for a peer that may be dead.
    """
    try:
        code = main(sys.argv[1:]) or guard.EXIT_OK
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        code = guard.EXIT_CONFIG
    except guard.BadNumerics as error:
        print(f"bad numerics: {error}", file=sys.stderr)
        code = guard.EXIT_NUMERICS
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else guard.EXIT_ERROR
    except BaseException:
        traceback.print_exc()
        code = guard.EXIT_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
