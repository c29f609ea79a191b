"""Set the XLA flags that were measured for this GPU, JAX version and config.

JAX reads the flags once, when it starts its backend, so programs call `apply` first. An unknown
flag would abort the process, so each row of the table names a JAX version. No flag is set for a GPU
or a JAX version without a measurement. NVLink multicast is always disabled: on shared hosts it can
take the GPUs out of service.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxpar.config import Config, ConfigError, replace
from jaxpar.execution.decisions import on_gpus
from jaxpar.execution.xla_flag_table import ALWAYS, ENVIRONMENT, FLAGS, PACKAGE, TABLE, Flag
from jaxpar.runtime.gpus.visible import gpu_is_present, gpu_name, visible_gpus


def matching_rows(gpu: str, jax_version: str, cfg: Config, num_processes: int = 1) -> list[Flag]:
    """Return the table's rows for a GPU name, a JAX version, a config and a process count."""
    ex = on_gpus(cfg)
    return [
        flag
        for flag in FLAGS
        if any(name in gpu for name in flag.gpus)
        and jax_version.startswith(flag.jax)
        and flag.where(ex)
        and not (flag.one_process and num_processes > 1)
    ]


def table_of(gpu: str) -> Path | None:
    """Return the table of tuned kernels for a GPU name, or None if there is none."""
    tables = [flag for flag in FLAGS if flag.name == TABLE]
    return next((PACKAGE / t.value for t in tables if any(n in gpu for n in t.gpus)), None)


def alike_everywhere(settings: str) -> str:
    """Return settings with paths of kernel tables relative to the package, for all hosts alike."""
    for flag in FLAGS:
        if flag.name == TABLE:
            settings = settings.replace(flag.setting, f"--{TABLE}={PACKAGE.name}/{flag.value}")
    return settings


#: What this process has set: flags as in XLA_FLAGS, and variables as "name=value".
_set_here: list[str] = []


def flags_of_user() -> dict[str, str]:
    """Return the flags of XLA_FLAGS that this process has not set, by name."""
    text = user_flags()
    for setting in _set_here:
        text = text.replace(setting, "")
    words = (word.lstrip("-").partition("=") for word in text.split())
    return {name: value for name, _, value in words}


def variables_of_user(names: Sequence[str]) -> dict[str, str]:
    """Return those of some environment variables that this process has not set."""
    given = {name: os.environ.get(name, "") for name in names}
    return {n: text for n, text in given.items() if text and f"{n}={text}" not in _set_here}


def apply(cfg: Config, num_processes: int = 1) -> list[str]:
    """Set the flags and environment for this host. Must run before JAX starts its backend.

    Args:     cfg: `parallel.data` may still be -1. Flags already in XLA_FLAGS take precedence.
              num_processes: of the run.
    Returns:  the settings, each as "name=value", for the log.
    """
    if not gpu_is_present():
        return []
    if cfg.run.xla_flags == "none":
        return _set_where_unset(ALWAYS)
    theirs = user_flags()
    gpu = gpu_name()
    cfg = _with_data(cfg, num_processes * visible_gpus())
    rows = matching_rows(gpu, jax.__version__, cfg, num_processes)
    names = {word.lstrip("-").partition("=")[0] for word in theirs.split()}
    flags = [f for f in rows if f.name not in names]
    settings = [flag.setting for flag in flags]
    os.environ["XLA_FLAGS"] = " ".join([*settings, theirs]).strip()
    _set_here.extend(settings)
    told = settings or [
        f"no XLA flags: none measured on {gpu or 'this GPU'} with JAX {jax.__version__}"
    ]
    return told + _set_where_unset(ALWAYS | ENVIRONMENT)


def _with_data(cfg: Config, devices: int) -> Config:
    """Return the config with its `parallel.data`: all remaining devices if that is -1."""
    p = cfg.parallel
    if p.data != -1:
        return cfg
    others = p.pipeline * p.replica * p.expert * p.sequence * p.tensor
    return replace(cfg, **{"parallel.data": max(devices // max(others, 1), 1)})


#: Flags by which XLA uses only kernels that give the same bits each time.
DETERMINISM = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")

#: NCCL adds in the order of a ring, and not in the switch, where the order may vary.
NCCL_RING = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}


def make_deterministic() -> list[str]:
    """Request deterministic kernels and collectives, where the user has not chosen them.

    Must run before JAX starts its backend, after `apply`. Returns the settings, as `apply`.
    """
    given = {word.lstrip("-").partition("=")[0] for word in user_flags().split()}
    settings = [] if given & set(DETERMINISM) else [f"--{DETERMINISM[0]}=true"]
    os.environ["XLA_FLAGS"] = " ".join([*settings, user_flags()]).strip()
    _set_here.extend(settings)
    return settings + _set_where_unset(NCCL_RING)


def user_flags() -> str:
    """Return the user's flags from XLA_FLAGS, or from the file that it names.

    The file is read here, since XLA does not read a file if other flags precede its name.

    Raises:   ConfigError for a file that cannot be read.
    """
    text = os.environ.get("XLA_FLAGS", "").strip()
    if not text or text.startswith("-"):
        return text
    try:
        return " ".join(Path(text).read_text("utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        rule = f"names a file of flags that cannot be read: {error}"
        fix = "set it to --name=value, or unset it"
        raise ConfigError("XLA_FLAGS", text, rule, fix) from None


def _set_where_unset(variables: dict[str, str]) -> list[str]:
    """Set environment variables that the user has not set, and return them as "name=value"."""
    unset = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(unset)
    settings = [f"{name}={value}" for name, value in unset.items()]
    _set_here.extend(settings)
    return settings
