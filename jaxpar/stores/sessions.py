"""Which session wrote a run last: the store's word against that of a folder.

A session is one attempt of a run, from taking the lease to releasing it. A folder lists the
sessions that wrote from it. The store names the last one. If it is in the list, nobody else has
written since, and what the folder has beyond the store is the run's own: a killed upload.
"""

from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import Address
from jaxpar.stores.objects import Missing, Objects

#: The file of a run's folder that lists its sessions, and the object that names the last one.
FILE, NAME = ".store_sessions", "session"


def last_session(objects: Objects) -> str:
    """Return the session that wrote a run last; empty for a new run. Raises:   StoreError."""
    try:
        return objects.read(NAME)[0].decode(errors="replace").strip()
    except Missing:
        return ""


def sessions_of(folder: Path) -> set[str]:
    """Return the sessions that wrote from a folder, and the addresses that it belongs to."""
    file = folder / FILE
    return set(file.read_text().split()) if file.is_file() else set()


def note(folder: Path, what: str, address: Address) -> None:
    """Record in a folder that it belongs to an address: a session, or a download."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "a") as file:
        file.write(f"{what} {address}\n")


def begin_session(objects: Objects, folder: Path, session: str) -> None:
    """Record a session, first in the folder: a kill in between loses nothing.

    Raises:   StoreError.
    """
    note(folder, session, objects.address)
    objects.write(NAME, session.encode())


def require_same_run(objects: Objects, folder: Path) -> None:
    """Check that a folder is empty, or belongs to the run of the store.

    Raises:   ConfigError.
    """
    has_run = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    if has_run and str(objects.address) not in sessions_of(folder):
        rule = f"contains another run than {objects.address}, which is not empty either"
        raise ConfigError("run.dir", str(folder), rule, "use a new --run.dir or --run.store")
