"""The command line shared by the programs: a config file, then typed overrides of any field."""

import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from jaxpar.config import Config, ConfigError

#: Exit codes that a scheduler can act on (docs/tour.md).
EXIT_ERROR, EXIT_CONFIG = 1, 2

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def load_config(name: str) -> Config:
    """The config of `configs/NAME.py`, or of the Python file at a path.

    A config file is code: it is imported and its `get_config()` is called. Run only your own.

    Raises:   ConfigError when there is no such file or it has no get_config().
    """
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.py")))
        raise ConfigError("CONFIG", name, "is no config file", f"give a .py file, or one of {known}")
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
    """Run a program's main on the command line; a ConfigError becomes one line and exit code 2."""
    try:
        code = main(sys.argv[1:])
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        code = EXIT_CONFIG
    sys.exit(code or 0)
