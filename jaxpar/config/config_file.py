"""A config by its name, from a Python file, or from the folder of a run.

The configs that come with jaxpar are `configs/*.py` of a checkout. A wheel has them as
`jaxpar/configs/`.
"""

import contextlib
import importlib.util
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.serialize import from_json

_PACKAGE = Path(__file__).resolve().parents[1]

_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")

#: The folder of the configs that come with jaxpar.
CONFIGS = next((folder for folder in _PLACES if folder.is_dir()), _PLACES[-1])


def known_configs() -> str:
    """Names of the configs that come with jaxpar."""
    return ", ".join(sorted(path.stem for path in CONFIGS.glob("*.py")))


def load_config(name: str) -> Config:
    """The config that a name stands for: `quickstart`, `my/config.py`, or a run's folder.

    A config file is code: it is imported and its `get_config()` is called. Run only your own.

    Raises:   ConfigError when there is no such config, it fails, or its get_config() returns no
              Config.
    """
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file() and Path(name).is_dir():
        return load_run(name)
    if not path.is_file():
        fix = f"give one of {known_configs()}, a .py file, or the folder of a run"
        raise ConfigError("CONFIG", name, "is not a config", fix)
    spec = importlib.util.spec_from_file_location(f"jaxpar_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _naming_the_line(name, path):
        spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError("CONFIG", name, "has no get_config()", f"see {_example()}")
    with _naming_the_line(name, path):
        cfg = module.get_config()
    if not isinstance(cfg, Config):
        rule = f"must return a Config from get_config(), not a {type(cfg).__name__}"
        raise ConfigError("CONFIG", name, rule, f"see {_example()}")
    return cfg


def _example() -> str:
    """The path of a config file that works, as short as it can be."""
    file = CONFIGS / "quickstart.py"
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


@contextlib.contextmanager
def _naming_the_line(name: str, path: Path) -> Iterator[None]:
    """What a config file's code raises becomes a ConfigError that names the line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line, reason = error.lineno, error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(path)]
            line, reason = lines[-1] if lines else None, str(error)
        where = f"line {line} of it" if line else "it"
        rule = f"cannot be used: {where} fails: {type(error).__name__}: {' '.join(reason.split())}"
        fix = f"correct {where}; {_example()} is one that works"
        raise ConfigError("CONFIG", name, rule, fix) from error


# --------------------------------------------------------------------------- the folder of a run


def load_run(folder: str) -> Config:
    """The config that the latest start of a run asked for, to resume the run in this folder.

    It is RUN/config.json, without what followed from that start's devices: `parallel.data` takes
    the devices that are there now, and fields that manifest.json lists as asked for have those
    values again. `run.dir` is the folder, wherever it lies now; `checkpoint.resume` is not "never".

    Raises:   ConfigError when the folder is not a run's, or its config.json cannot be read.
    """
    saved = Path(folder) / "config.json"
    if not saved.is_file():
        rule = "is a folder without a config.json, so there is no run to resume"
        fix = f"give the folder of a run, a .py file, or one of {known_configs()}"
        raise ConfigError("CONFIG", folder, rule, fix)
    try:
        text = saved.read_text("utf-8")
        values = json.loads(text)
    except ValueError as error:  # also of text that is not UTF-8
        fix = "use the config that the run was started with"
        raise ConfigError("CONFIG", folder, f"its config.json is damaged: {error}", fix) from error
    if not (isinstance(values, dict) and isinstance(values.get("run"), dict)):
        rule = "has a config.json that is not a run's, such as that of a published model"
        fix = "give the folder of a run; to start from a model's weights, give a config and "
        raise ConfigError("CONFIG", folder, rule, f"{fix}--run.init-from {folder}")
    cfg = replace(from_json(text), **{"run.dir": folder, "parallel.data": -1})
    if cfg.checkpoint.resume == "never":
        cfg = replace(cfg, **{"checkpoint.resume": "auto"})
    return replace(cfg, **_asked_for(Path(folder) / "manifest.json"))


def _asked_for(manifest: Path) -> dict[str, Any]:
    """Fields that the latest start asked for and that have other values in its config.json."""
    try:
        return dict(json.loads(manifest.read_text("utf-8"))["asked"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # an earlier version wrote it, or the start ended before it was written
