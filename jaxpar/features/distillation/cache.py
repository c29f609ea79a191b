"""A teacher's likeliest next tokens of each sequence of some datasets, in files.

about.json               `About`
SOURCE.NUMBER.teacher    a shard: some sequences of a source in order. The tokens, unsigned integers
                         [rows, T, k]; their log probabilities, float32 like them; and a checksum of
                         each row, uint32 [rows]. It appears when it is complete

A sequence is the one of `data/packing.py`: it depends on the dataset and its length alone, not on
seed, order, mixture or batch.
"""

import dataclasses
import functools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from jaxpar.config import Config, ConfigError, declared, flag
from jaxpar.config.declared import Name
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.data.formats.meta import token_dtype
from jaxpar.data.loader import Loader
from jaxpar.features.distillation import CACHE, IDS, SCORES, Distill
from jaxpar.sharding.batch import Batch

FORMAT, VERSION = "jaxpar-teacher", 1
ABOUT_FILE = "about.json"

#: Most bytes of about.json.
MAX_ABOUT = 1 << 20

#: Bytes of a shard to aim at.
SHARD_BYTES = 256 << 20


type Size = Annotated[int, Meta(ge=1, lt=1 << 31)]


@dataclass(frozen=True)
class About:
    """What a cache is of."""

    VERSION: ClassVar[int] = VERSION

    teacher: Name
    """Hash of the teacher's model and weights."""
    teacher_name: Name
    """Its folder and step, for messages."""
    sources: tuple[Name, ...]
    """Fingerprints of the datasets."""
    sequences: tuple[Annotated[int, Meta(ge=1, lt=1 << 48)], ...]
    """The number of sequences of each."""
    seq_len: Size
    document_mask: bool
    vocab_size: Size
    top_k: Size
    temperature: Annotated[float, Meta(gt=0, le=1e6)]
    rows: Size
    """Sequences of a shard; the last of a source may have fewer."""

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.sequences):
            raise ValueError("sources and sequences differ in number")

    def shards(self, source: int) -> int:
        """Return the number of shards of a source."""
        return -(-self.sequences[source] // self.rows)

    def rows_of(self, source: int, shard: int) -> int:
        """Return the number of sequences of a shard."""
        return min(self.rows, self.sequences[source] - shard * self.rows)


class TeacherFile:
    """The arrays of a shard, memory-mapped."""

    def __init__(self, about: About, source: int, number: int, path: Path, mode: Any = "r"):
        self._first = number * about.rows, source
        rows, shape = about.rows_of(source, number), (about.seq_len, about.top_k)
        dtypes = token_dtype(about.vocab_size), np.dtype("<f4"), np.dtype("<u4")
        shapes: list[tuple[int, ...]] = [(rows, *shape), (rows, *shape), (rows,)]
        ends = np.cumsum([0, *(d.itemsize * int(np.prod(s)) for d, s in zip(dtypes, shapes))])  # noqa: B905
        self.size = int(ends[-1])
        arrays = [
            np.memmap(path, dtype, mode, offset=int(at), shape=shape)
            for dtype, at, shape in zip(dtypes, ends, shapes, strict=False)
        ]
        self.ids, self.scores, self.checks = arrays

    def check_of(self, row: int) -> int:
        """Return the checksum that a row should have."""
        place = np.array([self._first[0] + row, self._first[1]], "<i8")
        return zlib.crc32(self.scores[row], zlib.crc32(self.ids[row], zlib.crc32(place)))


def size_of(about: About, source: int, number: int) -> int:
    """Return the bytes of a shard."""
    each = about.seq_len * about.top_k * (token_dtype(about.vocab_size).itemsize + 4) + 4
    return about.rows_of(source, number) * each


def shard_path(folder: Path, source: int, number: int) -> Path:
    """Return the file of a shard."""
    return folder / f"{source:02}.{number:06}.teacher"


def missing_shards(folder: Path, about: About) -> list[tuple[int, int]]:
    """Return the source and number of each shard that is not there."""
    shards = [(s, n) for s in range(len(about.sources)) for n in range(about.shards(s))]
    return [shard for shard in shards if not shard_path(folder, *shard).is_file()]


def read_about(folder: Path) -> About | None:
    """Read what a cache is of; None if there is none.

    Raises:   ConfigError if the file is damaged.
    """
    path = folder / ABOUT_FILE
    if not path.is_file():
        return None
    try:
        values = read_json_object(path, what="it", max_bytes=MAX_ABOUT)
        if values.get("format") != FORMAT:
            raise declared.Misshapen(f"its format is not {FORMAT}")
        return declared.convert(About, values)
    except (OSError, UnreadableJson) as error:
        why = error.strerror if isinstance(error, OSError) else error
        rule = f"{path} does not describe a teacher's tokens ({why})"
        raise ConfigError(CACHE, str(folder), rule, "copy the folder again") from error


def about_to_json(about: About) -> str:
    """Return the text of about.json."""
    return json.dumps({"format": FORMAT, **declared.to_builtins(about)}, indent=2) + "\n"


class TeacherCache:
    """A complete cache that fits a config."""

    def __init__(self, d: Distill, cfg: Config, sources: Sequence[str], sequences: Sequence[int]):
        """Open the cache of a config.

        Args:     sources: fingerprints of the training data. sequences: of each.
        Raises:   ConfigError if it is missing, incomplete, damaged, or of something else.
        """
        self._folder, self.top_k = Path(d.cache), d.top_k
        about = read_about(self._folder)
        if about is None:
            rule = f"has no {ABOUT_FILE}: no teacher has been kept there"
            fix = "run python -m jaxpar.data teacher with the same config first"
            raise ConfigError(CACHE, d.cache, rule, fix)
        self.about = about
        check_fits(about, d, cfg, sources, sequences)
        missing = missing_shards(self._folder, about)
        if missing:
            rule = f"is not complete: {len(missing):,} files are missing, such as "
            rule += shard_path(self._folder, *missing[0]).name
            fix = "run python -m jaxpar.data teacher again: it continues"
            raise ConfigError(CACHE, d.cache, rule, fix)
        for source in range(len(about.sources)):
            for number in range(about.shards(source)):
                self._check_size(source, number)
        self._shard = functools.lru_cache(maxsize=4096)(self._open)

    def read(self, source: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest tokens of sequences of a source.

        Args:     indices: int64 [N], each below the number of its sequences.
        Returns:  int32 [N, T, k], and their log probabilities, float32 [N, T, k].
        Raises:   ConfigError for a row that is damaged.
        """
        shape = len(indices), self.about.seq_len, self.top_k
        ids, scores = np.empty(shape, np.int32), np.empty(shape, np.float32)
        for at, index in enumerate(indices):
            number, row = divmod(int(index), self.about.rows)
            shard = self._shard(source, number)
            if shard.check_of(row) != shard.checks[row]:
                raise self._damaged(source, number, f"row {row:,} differs from its checksum")
            ids[at] = shard.ids[row, :, : self.top_k]
            scores[at] = shard.scores[row, :, : self.top_k]
        return ids, scores

    def _open(self, source: int, number: int) -> TeacherFile:
        return TeacherFile(self.about, source, number, shard_path(self._folder, source, number))

    def _check_size(self, source: int, number: int) -> None:
        wanted = size_of(self.about, source, number)
        found = shard_path(self._folder, source, number).stat().st_size
        if found != wanted:
            raise self._damaged(source, number, f"has {found:,} bytes, not {wanted:,}")

    def _damaged(self, source: int, number: int, what: str) -> ConfigError:
        path = shard_path(self._folder, source, number)
        fix = "delete that file, and run python -m jaxpar.data teacher again"
        return ConfigError(CACHE, str(self._folder), f"{path}: {what}", fix)


def check_fits(
    about: About, d: Distill, cfg: Config, sources: Sequence[str], sequences: Sequence[int]
) -> None:
    """Check that a cache is of the training data and the teacher's settings of a config.

    Raises:   ConfigError that names the field that differs.
    """
    wanted: dict[str, tuple[Any, Any]] = {
        "data.seq_len": (about.seq_len, cfg.data.seq_len),
        "data.document_mask": (about.document_mask, cfg.data.document_mask),
        "model.vocab_size": (about.vocab_size, cfg.model.vocab_size),
        "distill.temperature": (about.temperature, d.temperature),
    }
    for path, (kept, asked) in wanted.items():
        if kept != asked:
            rule = f"differs from that of {CACHE} {d.cache}, {kept}"
            raise ConfigError(path, asked, rule, f"use {flag(path, kept)}, or another cache")
    if d.top_k > about.top_k:
        rule = f"is more than {CACHE} {d.cache} has, {about.top_k}"
        fix = f"use {flag('distill.top_k', about.top_k)}, or another cache"
        raise ConfigError("distill.top_k", d.top_k, rule, fix)
    if (about.sources, about.sequences) != (tuple(sources), tuple(sequences)):
        rule = "is of other training data: sources, their order or their content differ"
        fix = "use that data, or another folder for python -m jaxpar.data teacher"
        raise ConfigError(CACHE, d.cache, rule, fix)


# ---------------------------------- Global batches with what a teacher says of them, from its files


class TeacherCacheLoader(Loader):
    """A `Loader` whose batches have `IDS` and `SCORES`."""

    def __init__(self, *args: Any, **more: Any):
        """As `Loader`. Raises: ConfigError also as `TeacherCache`."""
        super().__init__(*args, **more)
        sources = [source.dataset.fingerprint for source in self.sources]
        self.taught = TeacherCache(self._objective, self._cfg, sources, self.sequences_per_epoch)

    def _packed_sequences(self, numbers: np.ndarray, pieces: np.ndarray, length: int) -> Batch:
        assert length == self._cfg.data.seq_len  # a rule of the config: sequences are not cut
        batch = super()._packed_sequences(numbers, pieces, length)
        sources, before = self._mixture.places(numbers)
        shape = len(numbers), length, self.taught.top_k
        ids, scores = np.empty(shape, np.int32), np.empty(shape, np.float32)
        for source in np.unique(sources):
            at = np.flatnonzero(sources == source)
            indices = self._sequences[source](before[at])
            ids[at], scores[at] = self.taught.read(int(source), indices)
        return dataclasses.replace(batch, extra=batch.extra | {IDS: ids, SCORES: scores})
