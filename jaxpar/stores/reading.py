"""Lets commands read what is at an address: runs and models become folders of this host."""

import contextlib
import dataclasses
import fnmatch
import functools
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.options import OR_ADDRESS
from jaxpar.config.rules.paths import is_address, is_prefix, local_folder, read_address
from jaxpar.runtime import hub
from jaxpar.runtime.files.lock import RunLock
from jaxpar.runtime.processes import peers
from jaxpar.runtime.terminal import warn
from jaxpar.stores.fetching import fetch
from jaxpar.stores.files import SESSION, last_session, sessions_of
from jaxpar.stores.folders import update_copy
from jaxpar.stores.objects import Missing, Objects, OddName

#: Seconds that a command waits for another one that downloads the same run.
READERS_SECONDS = 3600.0


def for_reading(
    field: str,
    text: str,
    log: Callable[[str], None],
    step: int | None = None,
    checkpoints: bool = True,
) -> Path:
    """Return a folder of this host with a copy of a run, to read it. Takes no lease.

    It has the run's files and a checkpoint. Later calls download what has changed.

    Args:     field: the argument with the address. step: the checkpoint. None: the newest intact
              one. checkpoints: whether to download any.
    Raises:   ConfigError for an address without a run; as `fetch`.
    """
    address, folder = read_address(field, text), local_folder(read_address(field, text), "read")
    objects = Objects(address, field, patient=checkpoints)
    if not last_session(objects):
        raise _no_run(field, text)
    with RunLock(folder, READERS_SECONDS, log):  # another command may be downloading it
        fetch(objects, folder, log, step, reading=True, checkpoints=checkpoints)
    return folder


def runs_at(field: str, text: str, depth: int) -> list[str]:
    """Return the addresses of the runs at and below an address, in order.

    Args:     depth: of the prefixes that are looked into.
    Raises:   ConfigError for an address that cannot be used; StoreError.
    """
    address = read_address(field, text)
    objects = Objects(address, field, patient=False)

    def below(folder: str, depth: int) -> list[str]:
        try:
            folders, names = objects.level(folder)
        except OddName as error:
            if not folder:
                raise
            warn(f"{address}/{folder} is left out: it {error.rule}")
            return []
        if {f"{folder}config.json", f"{folder}{SESSION}"} <= set(names):
            return [f"{address}/{folder}".rstrip("/")]
        if not depth:
            return []
        return [run for one in folders if is_prefix(one) for run in below(f"{one}/", depth - 1)]

    return below("", depth)


def with_local_config(arguments: ConfigArguments) -> ConfigArguments:
    """Replace an address as CONFIG by a folder of this host with the config of its run.

    Raises:   ConfigError for an address without a run; StoreError.
    """
    address = read_address("CONFIG", arguments.name)
    objects, folder = Objects(address, "CONFIG", patient=False), local_folder(address, "runs")
    last = last_session(objects)
    if not last:
        raise _no_run("CONFIG", arguments.name)
    if last not in sessions_of(folder):
        for name in ("config.json", "manifest.json"):
            with contextlib.suppress(Missing):
                objects.download(name, folder / name)
    return dataclasses.replace(arguments, name=str(folder))


def _no_run(field: str, text: str) -> ConfigError:
    return ConfigError(field, text, "contains no run", "use the run.dir or run.store of a run")


def run_at(field: str, text: str, checkpoints: bool = True, step: int | None = None) -> Path | None:
    """Return the folder of a run, of which that of an address is copied to this host.

    Args:     text: a path or an address. checkpoints: whether to copy one. step: which; None: the
              newest intact one.
    Returns:  None for an address without a run.
    Raises:   ConfigError for an address that cannot be used; as `for_reading`.
    """
    return _run_at(field, text, checkpoints, step) if is_address(text) else Path(text)


@functools.cache
def _run_at(field: str, text: str, checkpoints: bool, step: int | None) -> Path | None:
    """As `run_at`, once for a process: the weights that it reads stay the same."""
    if not last_session(Objects(read_address(field, text), field)):
        return None
    return for_reading(field, text, peers.log, step, checkpoints)


def find_model(text: str, option: str, files: Sequence[str], rule: str, fix: str) -> hub.Snapshot:
    """Return the folder of a published model, as `hub.find`, or of the copy of an address.

    Raises:   also RunError if an object is damaged; StoreError.
    """
    if not is_address(text):
        return hub.find(text, option, files, rule, fix)
    address = read_address(option, text)
    objects = Objects(address, option)
    found = objects.names(exact=True)
    asked = [one for one in found if any(fnmatch.fnmatch(one.name, name) for name in files)]
    asked = [one for one in asked if not any(fnmatch.fnmatch(one.name, o) for o in hub.LEFT_OUT)]
    if not asked:
        rule = "contains neither a run nor a published model"
        raise ConfigError(option, text, rule, "correct the address")
    folder = local_folder(address, "models")
    update_copy(objects, folder, asked, {one.name for one in found})
    return hub.Snapshot(folder, str(address))


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
    return str(find_model(text, "RUN", PUBLISHED, rule, fix).folder)


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
