"""The token formats of other programs, and which files a path names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats import bin_file, datatrove, mds, megatron, npy_file, token_table, token_tar
from jaxpar.data.formats.columns import saved_shards
from jaxpar.data.formats.meta import META_FILE, SPLITS, TEST, TRAIN, VAL
from jaxpar.data.formats.token_file import Hints, TokenFile
from jaxpar.runtime.units import size


class Format(NamedTuple):
    """A format of tokens."""

    title: str
    """Its name, for a person."""
    find: Callable[[Path], Path | None]
    """Returns what to read for a file of this format, or a path that stands for it."""
    read: Callable[[Path, Hints], TokenFile | None]
    """Opens what `find` returned. None: it has no tokens."""
    trains: bool = True
    """Whether training reads it as it is; otherwise only `convert` and `inspect` do."""
    header: Callable[[int, int], tuple[bytes, np.dtype]] | None = None
    """Returns the header and the dtype of a vocabulary's size and a number of tokens, for
    `convert`."""


#: By the name that `convert --to` has for it. The first that finds a path is its format.
FORMATS = {
    "megatron": Format("a Megatron pair", megatron.index_of, megatron.read),
    "llmc": Format("llm.c", bin_file.find_llmc, bin_file.read_llmc, header=bin_file.llmc_header),
    "nanogpt": Format(
        "nanoGPT (no header)", bin_file.find, bin_file.read_nanogpt, header=bin_file.nanogpt_header
    ),
    "datatrove": Format("datatrove", datatrove.find, datatrove.read),
    "numpy": Format("NumPy", npy_file.find_numpy, npy_file.read_numpy),
    "olmo": Format("OLMo-core (no header)", npy_file.find, npy_file.read_bare),
    "table": Format("Parquet or Arrow", token_table.find_table, token_table.read_table),
    "mds": Format("MosaicML MDS", mds.find, mds.read, trains=False),
    "webdataset": Format("WebDataset", token_tar.find, token_tar.read, trains=False),
}

#: Words in the names of files that are not for training.
WORDS = {"val": VAL, "valid": VAL, "validation": VAL, "test": TEST}


def split_of(name: str) -> str:
    """Return the split that the words of a path say."""
    words = re.split("[^a-z]+", name.lower())
    return next((WORDS[word] for word in words if word in WORDS), TRAIN)


class NamedFile(NamedTuple):
    """A token file that a path names."""

    format: Format
    path: Path
    """What to read."""
    name: str
    """Its path below the folder that was named, or that of the file."""

    @property
    def split(self) -> str:
        """The split that its name says."""
        return split_of(self.name)


def find(path: Path) -> list[NamedFile]:
    """Return the token files of a file, of a folder and those below it, of a pattern with * or ?,
    or of several of these with commas between them; sorted, without those of no known format."""
    found = dict[Path, NamedFile]()
    for part in _parts(path):
        for file in _below(part) if part.is_dir() else [part]:
            name = str(file.relative_to(part)) if part.is_dir() else file.name
            for one in FORMATS.values():
                if (what := one.find(file)) is not None:
                    found.setdefault(what, NamedFile(one, what, name))
                    break
    return list(found.values())


def _parts(path: Path) -> list[Path]:
    if path.exists() or megatron.index_of(path) is not None:
        return [path]
    if "," in str(path):
        return [one for part in str(path).split(",") if part for one in _parts(Path(part))]
    start, pattern = Path(path.anchor or "."), str(path.relative_to(path.anchor))
    if set(pattern) & set("*?["):
        return sorted(start.glob(pattern)) or sorted(start.glob(f"{pattern}.idx"))
    return [path]


def _below(folder: Path, above: frozenset[Path] = frozenset()) -> list[Path]:
    """Return the files below a folder, sorted; of a saved Hugging Face dataset, its shards.

    Args:     above: the parent folders, to detect loops of links.
    Raises:   ConfigError for a folder that has prepared datasets.
    """
    if (folder / META_FILE).is_file():
        fix = f"use --data.path {folder}, or mix several: --data.mixture {folder}:1,OTHER:1"
        raise ConfigError("data.path", str(folder.parent), f"has the dataset {folder.name}", fix)
    if (folder / "state.json").is_file() and (shards := saved_shards(folder)) is not None:
        return shards
    files, above = list[Path](), above | {folder.resolve()}
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            files.append(path)
        elif not path.name.startswith(".") and path.resolve() not in above:
            files += _below(path, above)
    return [path for path in files if not path.name.startswith(".")]


def of_split(path: Path, found: list[NamedFile], split: str) -> list[NamedFile]:
    """Return the files of a split: those that are named after it, such as val.bin, or else those
    whose names say so; all others are the training split.

    Raises:   ConfigError for a folder most of whose bytes are not read.
    """
    exact = {Path(one.name).stem: one for one in found if "/" not in one.name}
    if TRAIN not in exact or not path.is_dir():
        return [one for one in found if one.split == split]
    others = [one for one in found if one not in [exact.get(name) for name in SPLITS]]
    read, left_out = (
        sum(one.path.stat().st_size for one in some)
        for some in ([one for one in found if one not in others], others)
    )
    if left_out > read:
        rule = f"has {len(others)} other files of tokens, {size(left_out)}, which are not read"
        fix = f"move them, or name what to read, such as '{path}/*{others[0].path.suffix}'"
        raise ConfigError("data.path", str(path), rule, fix)
    return [exact[split]] if split in exact else []
