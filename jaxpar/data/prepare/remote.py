"""Input files that are not on this host: objects of a store, and datasets of the Hugging Face Hub.

Such a file is read where a path is opened, so that readers need not know of it. An object is read
by ranges, and never on the disk as a whole. A file of the Hub is downloaded into its cache
(HF_HOME), one file at a time, and is read from there later on.
"""

import fnmatch
import functools
import io
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import Address, is_address, read_address
from jaxpar.data.formats.meta import TRAIN
from jaxpar.data.formats.others import WORDS, split_of
from jaxpar.runtime import hub

#: What an input of the Hub begins with, and the form of one.
HUB = "hf:"
_DATASET = re.compile(
    HUB + r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<split>.+))?"
)

#: Bytes of an object that are fetched at a time.
FETCHED = 8 << 20


class _Stat(NamedTuple):
    st_size: int


class RemotePath(PurePosixPath):
    """The path of a remote file, which can be opened and measured like that of a file."""

    def __str__(self) -> str:
        text = super().__str__()
        return re.sub("^(s3|gs):/", r"\1://", text)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file. Raises:   ConfigError, StoreError."""
        if is_address(str(self)):
            return cast(BinaryIO, io.BufferedReader(_Object(*self._object()), FETCHED))
        name, _, revision = "/".join(self.parts[:2]).removeprefix(HUB).partition("@")
        with _reaching(name, revision, str(self)):
            from huggingface_hub import hf_hub_download
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()  # `prepare` has its own
            file = "/".join(self.parts[2:])
            path = hf_hub_download(name, file, repo_type="dataset", revision=revision)
        return Path(path).open("rb")

    def stat(self) -> _Stat:
        """Return its size."""
        size = _sizes.get(str(self))
        if size is None:
            with self.open() as file:
                size = file.seek(0, io.SEEK_END)
        return _Stat(size)

    def _object(self) -> tuple[Any, str]:
        scheme, bucket, *folders = self.parts[:-1]
        address = Address(scheme.rstrip(":"), bucket, "/".join(folders))
        return _objects(address), self.name


#: The sizes of the files that were listed.
_sizes: dict[str, int] = {}


@functools.lru_cache(64)
def _objects(address: Address) -> Any:
    from jaxpar.stores.objects import Objects

    return Objects(address, "--input")


class _Object(io.RawIOBase):
    """The content of an object, which is fetched by ranges."""

    def __init__(self, objects: Any, name: str):
        super().__init__()
        self._objects, self._name, self._at = objects, name, 0
        self._size, self._stamp = objects.about(name)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        last = min(self._at + len(buffer), self._size)
        if last <= self._at:
            return 0
        content = self._objects.read_range(self._name, self._at, last, self._stamp)
        buffer[: len(content)] = content
        self._at = last
        return len(content)


def is_remote(name: str) -> bool:
    """Whether an input is not on this host."""
    return is_address(name) or name.startswith(HUB)


def files_of(name: str) -> tuple[Path, list[Path]]:
    """Return an input, as a folder, and its files, sorted; `RemotePath`s, in place of paths.

    Raises:   ConfigError("--input", ...) if there are none, or it cannot be reached; StoreError.
    """
    root, sizes = _listed_store(name) if is_address(name) else _listed_hub(name)
    _sizes.update({str(root / file): size for file, size in sizes.items()})
    return cast(Path, root), [cast(Path, root / file) for file in sorted(sizes)]


def _listed_store(name: str) -> tuple[RemotePath, dict[str, int]]:
    from jaxpar.stores.objects import Missing

    address = read_address("--input", name)
    found = {one.name: one.size for one in _objects(address).names()}
    root = RemotePath(str(address))
    if not found:  # perhaps one object
        above, _, file = address.prefix.rpartition("/")
        try:
            found = {file: _objects(address._replace(prefix=above)).about(file)[0]} if file else {}
        except Missing:
            found = {}
        root = root.parent
    if not found:
        fix = "correct the address of a file, or of what several files begin with"
        raise ConfigError("--input", name, "has no objects", fix)
    return root, found


def _reaching(name: str, revision: str | None, text: str) -> Any:
    here = f"on the Hub the dataset {name}"
    return hub.reaching(name, revision, text, "--input", here, kind="dataset")


def _listed_hub(text: str) -> tuple[RemotePath, dict[str, int]]:
    asked = _DATASET.fullmatch(text)
    if asked is None:
        fix = "use, for example, hf:roneneldan/TinyStories:train"
        raise ConfigError("--input", text, "must be hf:ORG/NAME, or hf:ORG/NAME:SPLIT", fix)
    name, revision, split = asked["name"], asked["revision"], asked["split"] or ""
    with _reaching(name, revision, text):
        from huggingface_hub import HfApi

        about = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    sizes = {one.rfilename: one.size or 0 for one in about.siblings or ()}
    card = about.card_data.to_dict() if about.card_data else {}
    chosen = _chosen(text, list(sizes), card.get("configs"), split)
    return RemotePath(f"{HUB}{name}@{about.sha}"), {file: sizes[file] for file in chosen}


def _declared(configs: Any) -> dict[str, list[str]]:
    """Return the patterns of files by what may be asked for: CONFIG/SPLIT, CONFIG for its train
    split, and SPLIT of the default one.

    Args:     configs: of the dataset's README.md.
    """
    found: dict[str, list[str]] = {}
    for one in configs if isinstance(configs, list) else ():
        name, files = str(one.get("config_name", "default")), one.get("data_files") or ()
        default = one.get("default") or name == "default" or len(configs) == 1
        for part in files if isinstance(files, list) else [files]:
            part = part if isinstance(part, dict) else {"path": part}
            split, paths = str(part.get("split", TRAIN)), part.get("path") or ()
            names = [f"{name}/{split}", *([split] * bool(default)), *([name] * (split == TRAIN))]
            for asked in dict.fromkeys(names):
                found.setdefault(asked, []).extend([paths] if isinstance(paths, str) else paths)
    return found


def _chosen(text: str, files: Sequence[str], configs: Any, split: str) -> list[str]:
    """Return the files of a split: as the dataset declares it; or of a folder; or by their names.

    Raises:   ConfigError that names the choices.
    """
    declared = _declared(configs)
    if patterns := declared.get(split or TRAIN):
        return [f for f in files if any(fnmatch.fnmatch(f, pattern) for pattern in patterns)]
    found = [file for file in files if split and file.startswith(f"{split.rstrip('/')}/")]
    if not found and not declared:
        wanted = WORDS.get(split, split or TRAIN)
        found = [file for file in files if split_of(file) == wanted]
    if not found:
        choices = sorted(declared) or sorted({split_of(file) for file in files})
        asked = _DATASET.fullmatch(text)
        assert asked is not None
        fix = f"use {HUB}{asked['name']}:{choices[0]}, or one of {', '.join(choices[:12])}"
        raise ConfigError("--input", text, f"has no split {split or TRAIN!r}", fix)
    return found
