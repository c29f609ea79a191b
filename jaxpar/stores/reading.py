"""Lets a command read a run of a store: its address becomes a folder with a copy of it."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.options import OR_ADDRESS
from jaxpar.config.rules.paths import is_address
from jaxpar.stores.fetching import for_reading
from jaxpar.stores.models import find, run_at

#: Files of a published model.
PUBLISHED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")

#: Options that write into the run's folder or follow it, which a copy does not allow.
NOT_OF_A_COPY = ("save", "follow", "watch")


def with_local_runs[T](options: T, log: Callable[[str], None], checkpoints: bool = True) -> T:
    """Replace the addresses of runs in a command's options by folders of this host.

    Args:     options: a dataclass; the fields marked OR_ADDRESS may hold addresses. Its `step` is
              the checkpoint to download, None for the newest. checkpoints: whether the command
              reads any.
    Raises:   ConfigError for an option that needs the run itself, or as `for_reading`; StoreError.
    """
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(type(options), include_extras=True)
    given: Any = options
    for field in dataclasses.fields(given):
        value = getattr(options, field.name)
        if OR_ADDRESS not in getattr(hints[field.name], "__metadata__", ()):
            continue
        texts = value if isinstance(value, tuple) else (value,)
        if not any(map(is_address, texts)):
            continue
        step = _step(given, texts)
        local = tuple(_local(text, log, step, checkpoints) for text in texts)
        values[field.name] = local if isinstance(value, tuple) else local[0]
    return dataclasses.replace(given, **values)


def _local(text: str, log: Callable[[str], None], step: int | None, checkpoints: bool) -> str:
    """Return a folder with a copy of the run or the published model of an address."""
    if not is_address(text):
        return text
    if run_at("RUN", text, checkpoints=False) is not None:
        return str(for_reading("RUN", text, log, step, checkpoints))
    rule, fix = "contains no run", "use the run.dir or run.store of a run"
    return str(find(text, "RUN", PUBLISHED, rule, fix).folder)


def _step(options: Any, texts: tuple[str, ...]) -> int | None:
    """Return the checkpoint to download. Raises:   ConfigError for what a copy does not have."""
    for name in NOT_OF_A_COPY:
        if getattr(options, name, None):
            rule = f"needs the folder of the run, but RUN is an address: {texts[0]}"
            fix = f"leave out --{name}, or use the run.dir of the run"
            raise ConfigError(f"--{name}", getattr(options, name), rule, fix)
    step = getattr(options, "step", None)
    if step is not None and not isinstance(step, int):
        rule = "is known only to a run's folder, but RUN is an address"
        raise ConfigError("--step", step, rule, "use --step with a number")
    return step
