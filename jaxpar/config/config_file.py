"""Load a config by its name, from a Python file, or from a run folder.

The configs that come with jaxpar are in `configs/` of a checkout, or `jaxpar/configs/` of a wheel.
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter
from pathlib import Path
from types import CodeType
from typing import Any

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.json_reader import UnreadableJson, read_json, read_json_object
from jaxpar.config.listed import plain, read_value, written
from jaxpar.config.names import CONFIG_MODULE
from jaxpar.config.numerals import with_unit
from jaxpar.config.rules.paths import refuse_address
from jaxpar.config.rules.type_check import describe, fits
from jaxpar.config.serialize import field_from_values, from_values

_PACKAGE = Path(__file__).resolve().parents[1]


def place_of(folder: str) -> Path:
    """Return a folder that is at the root of a checkout, or in the package of a wheel."""
    places = (_PACKAGE / folder, _PACKAGE.parent / folder)
    return next((place for place in places if place.is_dir()), places[-1])


#: The folder of the configs that come with jaxpar.
CONFIGS = place_of("configs")


#: The fix for what is no config.
KNOWN = "use a config such as quickstart (--help lists all), a .py file or the folder of a run"


def known_configs() -> str:
    """Return the names of the configs that come with jaxpar."""
    names = (path.relative_to(CONFIGS).with_suffix("") for path in CONFIGS.rglob("*.py"))
    return ", ".join(sorted(name.as_posix() for name in names))


def load_config(name: str) -> Config:
    """Load a config by its name: `quickstart`, `my/config.py`, or a run folder.

    A config file is code: it is imported and its `get_config()` is called, with the arguments that
    follow the name: `llama:params=350M,tokens=7B`. Use only files that you trust.

    Raises:   ConfigError if the config does not exist or fails, or if its get_config() does not
              take the arguments or does not return a Config.
    """
    refuse_address("CONFIG", name, "use the name of a config, a .py file or a run folder")
    name, _, given = name.partition(":") if not Path(name).exists() else (name, "", "")
    path = _file_of(name)
    if not path.is_file() and Path(name).is_dir():
        return load_run(name)
    arguments = _read_arguments(name, given)
    with _naming_the_line(name, path):
        cfg = _get_config(name)(**arguments)
    if not isinstance(cfg, Config):
        rule = f"must return a Config from get_config(), not {type(cfg).__name__}"
        raise ConfigError("CONFIG", name, rule, f"see {_example()}")
    return cfg


def arguments_of(name: str) -> Mapping[str, Parameter]:
    """Return the parameters of a config's get_config() by name; none for a run or no config.

    Their annotations may be `Annotated[TYPE, MEANING]`, for --help.
    """
    name = name.partition(":")[0]
    if not _file_of(name).is_file():
        return {}
    found = inspect.signature(_get_config(name), eval_str=True).parameters
    for parameter in found.values():
        if parameter.default is Parameter.empty:
            rule = f"its get_config() has no default for {parameter}, which may not be given"
            raise ConfigError("CONFIG", name, rule, f"give it one: {parameter.name}=VALUE")
    return found


def type_of(parameter: Parameter) -> Any:
    """Return the type of a parameter of get_config(): as annotated, or that of its default."""
    empty = parameter.annotation is Parameter.empty
    return type(parameter.default) if empty else plain(parameter.annotation)


def with_arguments(name: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Move options that are parameters of a config's get_config() into the config's name.

    `llama` with `--params 350M` becomes `llama:params=350M`, which `load_config` reads.

    Returns:  the name, and the other words.
    """
    known, given, others = arguments_of(name), dict[str, str](), list[str]()
    rest = iter(words)
    for word in rest:
        option, equals, text = word.partition("=")
        parameter = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and parameter in known:
            given[parameter] = text if equals else next(rest, "")
        elif known and "." not in option and (near := get_close_matches(parameter, known, n=1)):
            raise ConfigError(option, text, f"is not an argument of {name}", f"use --{near[0]}")
        else:
            others.append(word)
    texts = [f"{parameter}={text}" for parameter, text in given.items()]
    name, _, before = name.partition(":")
    every = ",".join(filter(None, [before, *texts]))
    return f"{name}:{every}" if every else name, others


def _read_arguments(name: str, given: str) -> dict[str, Any]:
    """Read the arguments of a config, such as `params=350M,tokens=7B`."""
    known, read = arguments_of(name), dict[str, Any]()
    for one in given.split(",") if given else []:
        parameter, _, text = one.partition("=")
        option = "--" + parameter.replace("_", "-")
        if parameter not in known:
            fix = f"use one of {', '.join(known)}" if known else f"use {name} without {option}"
            raise ConfigError(option, text, f"is not an argument of {name}", fix)
        read[parameter] = read_value(text, type_of(known[parameter]))
        if not fits(read[parameter], type_of(known[parameter])):
            rule = f"must be {describe(type_of(known[parameter]))}"
            fix = f"use {option} {default_in_words(known[parameter])}"
            raise ConfigError(option, text, rule, fix)
    return read


def default_in_words(parameter: Parameter) -> str:
    """Return the default of a parameter of get_config(), as on a command line: 125M."""
    default = parameter.default
    return with_unit(default) if isinstance(default, float) else written(default)


def _file_of(name: str) -> Path:
    return Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"


def _get_config(name: str) -> Callable[..., Any]:
    path = _file_of(name)
    if not path.is_file():
        raise no_config(name)
    module = import_file(name, path)
    if not hasattr(module, "get_config"):
        raise ConfigError("CONFIG", name, "has no get_config()", f"see {_example()}")
    return module.get_config


def import_file(name: str, path: Path | None = None) -> Any:
    """Import a Python file.

    Args:     name: of the file, for errors. path: None: the name is its path.
    Raises:   ConfigError if it does not exist, or fails.
    """
    path = path or Path(name)
    if not path.is_file():
        raise no_config(name)
    with _naming_the_line(name, path):
        return _module(path.resolve(), path.read_bytes())


class _LoaderOfText(importlib.machinery.SourceFileLoader):
    """Run the text that was read.

    Python's own loader would take the bytecode of an earlier file that has the same size and was
    written in the same second.
    """

    def __init__(self, name: str, path: str, text: bytes):
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text, self.path)


@functools.cache
def _module(path: Path, text: bytes) -> Any:
    """Import a file. One that has not changed is imported once, so that its classes are the same.

    Args:     path: absolute. text: that of the file.
    """
    loader = _LoaderOfText(CONFIG_MODULE + path.stem, str(path), text)
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    loader.exec_module(module)
    return module


def no_config(name: str, rule: str = "is not a config") -> ConfigError:
    """Return the error for what is no config, with the names that are most similar to it."""
    is_file = name.endswith(".py")
    plain = name.lower().replace("-", "_").removesuffix(".py")
    if near := get_close_matches(plain, known_configs().split(", "), n=3):
        fix = f"use {', or '.join(near)}; --help lists all"
    elif is_file:
        fix = "correct the path, or use a config of jaxpar; --help lists them"
    else:
        fix = KNOWN + f"; for a published model, --from {name}" * (not name.startswith("runs/"))
    return ConfigError("CONFIG", name, "does not exist" if is_file else rule, fix)


def _example() -> str:
    """Return the path of an example config file, relative if possible."""
    file = CONFIGS / "quickstart.py"
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


@contextlib.contextmanager
def _naming_the_line(name: str, path: Path) -> Iterator[None]:
    """Convert an exception of a config file's code to a ConfigError that names the line."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename in (str(path), str(path.resolve())):
            line, reason = error.lineno, error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            names = (str(path), str(path.resolve()))
            lines = [frame.lineno for frame in frames if frame.filename in names]
            line, reason = lines[-1] if lines else None, str(error)
        where = f" at line {line}" if line else ""
        reason = " ".join(reason.split()).rstrip("?.")
        rule = f"fails{where}: {type(error).__name__}: {reason}"
        fix = f"correct it; for an example, see {_example()}"
        raise ConfigError("CONFIG", name, rule, fix) from error


# ------------------------------------------------------------------------------------ run folder


def load_run(folder: str) -> Config:
    """Load the latest config of a run, to resume the run in its folder.

    The config is RUN/config.json without the values derived from the devices of that start:
    `parallel.data` uses the current devices, and the fields under "asked" in manifest.json get
    those values back. `run.dir` is the given folder, and `checkpoint.resume` is not "never".

    Raises:   ConfigError if the folder is not a run, or its config.json cannot be read.
    """
    saved = Path(folder) / "config.json"
    if not saved.is_file():
        rule = "is not a run folder: it has no config.json"
        raise ConfigError("CONFIG", folder, rule, KNOWN)
    try:
        values = read_json(saved, what="it")
    except UnreadableJson as error:
        fix = "use the config that the run was started with"
        raise ConfigError("CONFIG", folder, f"has a damaged config.json: {error}", fix) from error
    if not (isinstance(values, dict) and isinstance(values.get("run"), dict)):
        rule = "is not a run folder: its config.json is not a run's, perhaps a published model's"
        fix = "use a run folder; to start from a model's weights, use a config with "
        raise ConfigError("CONFIG", folder, rule, f"{fix}--run.init-from {folder}")
    cfg = replace(from_values(values), **{"run.dir": folder, "parallel.data": -1})
    if cfg.checkpoint.resume == "never":
        cfg = replace(cfg, **{"checkpoint.resume": "auto"})
    return replace(cfg, **_asked_for(Path(folder) / "manifest.json"))


def _asked_for(manifest: Path) -> dict[str, Any]:
    """Return the requested values of fields that have other values in config.json."""
    try:
        asked = read_json_object(manifest).get("asked")
    except (OSError, UnreadableJson):
        asked = None  # the start ended before writing it
    asked = asked if isinstance(asked, dict) else {}
    return {path: field_from_values(path, value) for path, value in asked.items()}
