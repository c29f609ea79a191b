"""A folder in a store that is complete or absent: a dataset, or an exported model.

Its files are objects. One of them, without which nobody takes the folder for what it is, is written
last, and deleted first. FILES lists the others with their sizes and SHA-256.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpar.stores.objects import Altered, Conflict, Content, Missing, Objects, content_of
from jaxpar.stores.steps import FILES_AT_ONCE

#: The object that lists the files.
FILES = "stored_files.json"

#: Marks the form of the list of files.
FORMAT = 1


class InUse(Exception):
    """Another writer has completed a folder at the address."""


def upload_folder(objects: Objects, folder: Path, last: str, replace: bool = False) -> int:
    """Upload a folder, and return its size in bytes.

    Args:     last: the file that is written last. replace: a folder that is there.
    Raises:   InUse; StoreError.
    """
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert last in names
    there = {found.name for found in objects.names()}
    if last in there:
        if not replace:
            raise InUse
        objects.delete([last])
    objects.delete(sorted(there - {last} - set(names)))
    send = lambda name: objects.upload(name, folder / name)  # noqa: E731
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="upload") as pool:
        others = [name for name in names if name != last]
        contents = dict(zip(others, pool.map(send, others), strict=True))
    about = {"format": FORMAT, "files": {name: one._asdict() for name, one in contents.items()}}
    objects.write(FILES, json.dumps(about, indent=1, sort_keys=True).encode())
    content = (folder / last).read_bytes()
    try:
        objects.write_if(last, content, None)
    except Conflict:  # the answer of a request that won may be lost
        if objects.read(last)[0] != content:
            raise InUse from None
    return sum(one.bytes for one in contents.values()) + len(content)


def listed_files(objects: Objects) -> dict[str, Content]:
    """Return the files that `upload_folder` has recorded; empty if it has not written the folder.

    Raises:   Altered if the list is damaged; StoreError.
    """
    try:
        about = json.loads(objects.read(FILES)[0])
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError("is no list of files")
        return dict(content_of(about.get("files")))
    except Missing:
        return {}
    except ValueError as error:
        raise Altered(f"{FILES} {error}") from error
