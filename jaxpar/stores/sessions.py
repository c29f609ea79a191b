"""Which session wrote a run last: the store's word against that of a folder.

A session is one attempt of a run, from taking the lease to releasing it. A folder lists the
sessions that wrote from it. The store names the last one. If it is in the list, nobody else has
written since, and what the folder has beyond the store is the run's own: a killed upload.
"""

from pathlib import Path

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
    """Return the sessions that wrote from a folder."""
    file = folder / FILE
    return set(file.read_text().split()) if file.is_file() else set()


def begin_session(objects: Objects, folder: Path, session: str) -> None:
    """Record a session, first in the folder: a kill in between loses nothing.

    Raises:   StoreError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "a") as file:
        file.write(f"{session}\n")
    objects.write(NAME, session.encode())
