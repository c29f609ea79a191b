"""Parts of a dataset in an object store, written by processes that need not share a folder.

The first process creates the object plan.json, and all follow it. A part is complete once it has
part.json, its last object. Whoever completes the last part writes meta.json.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpar.config.rules.paths import read_address
from jaxpar.data.formats.meta import COUNTS_FILE, META_FILE, PART_FILE, PLAN_FILE, SENT_FILE
from jaxpar.data.stored import send_part
from jaxpar.stores.objects import Conflict, Missing, Objects
from jaxpar.stores.steps import FILES_AT_ONCE


class StoredParts:
    """The parts at an address. Its methods raise StoreError."""

    def __init__(self, output: str):
        """Args:     output: the option --output. Raises:   ConfigError."""
        self._output = output
        self._objects = Objects(read_address("--output", output), "--output")

    def copy(self, name: str, folder: Path) -> bool:
        """Copy an object into a folder. Returns:  whether there is one."""
        try:
            self._objects.download(name, folder / name)
        except Missing:
            return False
        return True

    def share_plan(self, work: Path) -> None:
        """Create plan.json; if another process has done so, that replaces the folder's."""
        try:
            self._objects.write_if(PLAN_FILE, (work / PLAN_FILE).read_bytes(), None)
        except Conflict:
            self.copy(PLAN_FILE, work)

    def delete(self) -> None:
        """Delete what makes the objects a dataset, complete parts and a plan, in this order."""
        parts = [f"{part}/{PART_FILE}" for part in sorted(self.complete())]
        for some in ([META_FILE], parts, [PLAN_FILE]):
            self._objects.delete(some)

    def complete(self) -> set[str]:
        """Return the folders of the complete parts."""
        names = (Path(found.name) for found in self._objects.names())
        return {str(name.parent) for name in names if name.name == PART_FILE}

    def send(self, folder: Path) -> None:
        """Upload a part, and delete it here."""
        send_part(folder, self._output)
        shutil.rmtree(folder)

    def fetch(self, work: Path, folders: Sequence[str]) -> None:
        """Copy what the manifest needs of complete parts."""
        files = (PART_FILE, COUNTS_FILE, SENT_FILE)
        names = [f"{folder}/{file}" for folder in folders for file in files]
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="copy") as pool:
            list(pool.map(lambda name: self._objects.download(name, work / name), names))
