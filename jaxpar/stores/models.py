"""Models at addresses: runs to start from, and published models, copied to this host."""

import fnmatch
import functools
from collections.abc import Sequence
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import is_address, local_folder, read_address
from jaxpar.runtime import hub
from jaxpar.runtime.processes import peers
from jaxpar.stores.fetching import for_reading
from jaxpar.stores.folders import update_copy
from jaxpar.stores.objects import Objects
from jaxpar.stores.sessions import last_session


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


def find(text: str, option: str, files: Sequence[str], rule: str, fix: str) -> hub.Snapshot:
    """Return the folder of a published model, as `hub.find`, or of the copy of an address.

    Raises:   also RunError if an object is damaged; StoreError.
    """
    if not is_address(text):
        return hub.find(text, option, files, rule, fix)
    address = read_address(option, text)
    objects = Objects(address, option)
    names = [found.name for found in objects.names(exact=True)]
    asked = [name for name in names if any(fnmatch.fnmatch(name, one) for one in files)]
    asked = [name for name in asked if not any(fnmatch.fnmatch(name, o) for o in hub.LEFT_OUT)]
    if not asked:
        rule = "contains neither a run nor a published model"
        raise ConfigError(option, text, rule, "correct the address")
    folder = local_folder(address, "models")
    update_copy(objects, folder, asked, set(names))
    return hub.Snapshot(folder, str(address))
