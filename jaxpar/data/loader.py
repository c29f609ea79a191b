"""Global batches as a pure function of seed and step. Each process reads only its own rows."""

import contextlib
import dataclasses
import itertools
import math
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import chex
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.fields import switches_for
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.config.lists.step_sizes import (
    StepSizes,
    sequences_before,
    step_sizes,
    without_schedules,
)
from jaxpar.config.schema.features import objective_in
from jaxpar.config.values import require_code
from jaxpar.data.formats.meta import PAIRS, TRAIN
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.mixture import BLOCK, StagedMixture
from jaxpar.data.own import DataSource, Positions, checked, iterates
from jaxpar.data.packing import Disordered, document_begins, num_sequences, pack
from jaxpar.data.shuffle import sequence_order
from jaxpar.data.skips import SkippedBatches
from jaxpar.data.sources import open_sources
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import IGNORED, Batch, with_abstract_extra

#: The name in `Batch.extra` of the source of each sequence.
SOURCE = "source"


class Loader:
    """Random access to the batches of one split.

    Step s uses batch s, or a later one if earlier batches are skipped (`skipped`). Its rows are the
    next sequences of an endless stream. "train" has a new random order in each epoch; "val" repeats
    the sequences in text order. Several sources are mixed by weight (`mixture.py`), each with its
    own endless stream. Evaluations read a finite set instead: `first_sequences` and `once`.

    Schedules change weights and sizes at the batch with the number of the step (that step's, if no
    earlier one is skipped). The stream is one of sequences of `data.seq_len` tokens at any size of
    the steps: a batch of shorter ones has the next of these, each cut into pieces, and so is a
    function of its number and of the schedules alone.
    """

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        split: str = TRAIN,
        order: Callable[[int], np.ndarray | None] = lambda length: None,
    ):
        """Open the sources and check that the config can use them.

        Args:     order: of tokens along the sequence axis, by the length T of a sequence: column t
                  holds text position order(T)[t], int [T], a permutation of range(T). None: the
                  text's order.
        Raises:   ConfigError for a source that is missing, damaged, shorter than a sequence, or has
                  a larger vocabulary than the model.
        """
        self.sources = open_sources(cfg, split)
        self.split, self._objective = split, objective_in(cfg)
        self._cfg = cfg if split == TRAIN else without_schedules(cfg)
        self._own: Any = cfg.data.source if split == TRAIN else None
        require_code(cfg, ["data.source"])
        self._sharding, self.sizes = NamedSharding(mesh, BATCH_SPEC), step_sizes(self._cfg)
        self._positions: Positions | None = None
        if isinstance(self._own, DataSource) and iterates(self._own):
            most = cfg.data.prefetch + 2  # those ahead, also if the next batch fails
            self._positions = Positions(self._own, cfg.train.seed, self._shape_of, most)
        lengths = sorted({size.length for size in self.sizes.sizes})
        shapes = [(size.rows, size.length) for size in self.sizes.sizes]
        self._rows = {shape[0]: rows_of_process(self._sharding, shape) for shape in shapes}
        self._order = {length: _checked_order(order(length), length) for length in lengths}
        for source in self.sources:
            self._check_fits(source.dataset)
        some = any(source.dataset.targets is not None for source in self.sources)
        self._has_targets = some and cfg.data.loss_on == "targets"
        seeds = source_seeds(cfg.train.seed if split == TRAIN else None, len(self.sources))
        self._sequences = [
            sequence_order(count, seed)
            for count, seed in zip(self.sequences_per_epoch, seeds, strict=True)
        ]
        seed = cfg.train.seed if split == TRAIN else 0
        self.skipped = SkippedBatches()
        later = cfg.data.mixture_schedule if split == TRAIN else ()
        starts = [0, *(sequences_before(self._cfg, stage.step) for stage in later)]
        first = tuple(source.weight for source in self.sources)
        weights = [first, *(stage.weights for stage in later)]
        self._mixture = StagedMixture(starts, weights, seed)

    def _check_fits(self, dataset: TokenDataset) -> None:
        cfg, seq_len, found = self._cfg, self._cfg.data.seq_len, dataset.num_tokens
        check_vocabulary(cfg, dataset)
        if dataset.meta is not None and dataset.meta.kind == PAIRS:
            rule, path = "is a dataset of pairs of responses", dataset.name
            fix = "use " + ", or ".join([*switches_for(PAIRS), "other data"])
            raise ConfigError("data.path", path, rule, fix)
        if num_sequences(found, seq_len) == 0:
            rule = f"needs {seq_len + 1} tokens, but {dataset.split} of {dataset.name} has {found}"
            raise ConfigError("data.seq_len", seq_len, rule, "use shorter sequences or more text")

    @property
    def sequences_per_epoch(self) -> list[int]:
        """The number of sequences in each source."""
        seq_len = self._cfg.data.seq_len
        return [num_sequences(source.dataset.num_tokens, seq_len) for source in self.sources]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all sources."""
        return sum(source.dataset.num_tokens for source in self.sources)

    def bytes_per_token(self, numbers: np.ndarray) -> float | None:
        """Return the mean of UTF-8 bytes of text per token; None if unknown for a source.

        Args:     numbers: int64 [N], the sequences of the stream that are read. The mean is
                  weighted by how many of them each source has.
        """
        ratios = [source.dataset.bytes_per_token for source in self.sources]
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) < len(ratios):
            return None
        sources, _ = self._mixture.places(numbers)
        return float(np.average(known, weights=np.bincount(sources, minlength=len(known))))

    @property
    def max_documents(self) -> int:
        """An upper bound on the segments in a sequence, rounded up to a power of two."""
        if not self._cfg.data.document_mask:
            return 1
        if self._own is not None:
            return 1 << (self._cfg.data.seq_len - 1).bit_length()
        seq_len = self._cfg.data.seq_len
        most = max(source.dataset.max_documents(seq_len) for source in self.sources)
        return 1 << (most - 1).bit_length()

    def epochs(self, num_steps: int) -> dict[str, float]:
        """Return the epochs of each source in the first num_steps steps, by path."""
        if self._own is not None:
            return {}
        batches = self._batches_before(num_steps)
        taken = self._mixture.taken(sequences_before(self._cfg, batches))
        paths = [source.dataset.name for source in self.sources]
        return dict(zip(paths, (taken / self.sequences_per_epoch).tolist(), strict=True))

    def _batches_before(self, step: int) -> int:
        """Return the number of batches, with those skipped between them, of the first steps."""
        return self.skipped.batch_of(step - 1) + 1 if step else 0

    def position(self, step: int) -> str:
        """Return where a source with `next` goes on after some steps, for a checkpoint of them.

        Batches that are prefetched do not count. Other data has no position: "".
        """
        return self._positions.before(self._batches_before(step)) if self._positions else ""

    def go_on(self, position: str | None, where: str = "") -> None:
        """Go on from a position of `position`. None: from the start.

        Args:     where: what has the position, for errors.
        Raises:   ConfigError for a position that is missing, or damaged, or not for the source.
        """
        if position is not None and bool(position) != bool(self._positions):
            rule = f"defines next, but {where} has no state for it"
            if position:
                rule = f"defines __call__, but {where} is of one with next"
            fix = "use a new run.dir, or the source as it was"
            raise ConfigError("data.source", type(self._own).__name__, rule, fix)
        if self._positions is not None:
            try:
                self._positions.go_on(position or "")
            except UnreadableJson as error:
                rule = f"{where} has a state that cannot be read ({error})"
                fix = "delete that checkpoint, to resume from the one before, or use a new run.dir"
                raise ConfigError("data.source", type(self._own).__name__, rule, fix) from error

    @property
    def sizes_of_steps(self) -> StepSizes:
        """The sizes of the steps, some of which use later batches if batches are skipped."""
        return self.sizes.moved(self.skipped.first_step_from)

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step, the same on every mesh and number of processes.

        Returns:  a Batch of int32 [B, T] jax arrays sharded by BATCH_SPEC.
        """
        return self._place(step, self._own_rows(step))

    def abstract_batch(self, step: int = 0) -> Batch:
        """Return what `batch` returns, without values: shapes, dtypes and shardings."""
        _, rows, length = self.sizes.at(self.skipped.batch_of(step))
        array = jax.ShapeDtypeStruct((rows, length), np.int32, sharding=self._sharding)
        plain = Batch(array, array, array, array, extra=dict.fromkeys(self._reads, array))
        gives = self._objective is not None and self._objective.loader(self.split) is not None
        return with_abstract_extra(plain, self._cfg) if gives else plain

    def _own_rows(self, step: int) -> Batch:
        rows = self._rows[self.sizes.at(self.skipped.batch_of(step)).rows]
        return self.host_rows(step, rows)

    def host_rows(self, step: int, rows: np.ndarray) -> Batch:
        """Return some rows of a step's global batch, in this process's memory.

        Args:     rows: int64 [N], each below the number of rows of the batch.
        Returns:  a Batch of int32 [N, T] numpy arrays.
        """
        batch = self.skipped.batch_of(step)
        length = self.sizes.at(batch).length
        if self._own is not None:
            shape = self._shape_of(batch)
            if self._positions is not None:
                made = self._positions.made(batch)
            else:
                made = self._own(self._cfg.train.seed, batch, shape)
            made = checked(self._own, made, shape, self._cfg)
            return self._ordered(jax.tree.map(lambda a: a[rows], made), length)
        numbers, pieces = np.divmod(np.asarray(rows, np.int64), self._cfg.data.seq_len // length)
        numbers += sequences_before(self._cfg, batch)
        return self._ordered(self._packed_sequences(numbers, pieces, length), length)

    def _shape_of(self, batch: int) -> tuple[int, int]:
        _, rows, length = self.sizes.at(batch)
        return rows, length

    def _ordered(self, packed: Batch, length: int) -> Batch:
        """Put the tokens of host rows into the order of the sequence axis."""
        order = self._order[length]
        return packed if order is None else jax.tree.map(lambda x_NT: x_NT[:, order], packed)

    def sequences(self, source: int, indices: np.ndarray) -> Batch:
        """Return a global batch of some sequences of a source, like `batch`.

        Args:     indices: int64 [global_batch_size], the same in every process.
        """
        size, length = self.sizes.at(0).rows, self._cfg.data.seq_len
        own = indices[self._rows[size]]
        packed = pack(*self._sequences_at(source, own, length))
        return self._place(0, self._ordered(packed, length))

    def first_labeled(self) -> int | None:
        """Return the first batch in the first epoch that has a label, or None.

        A sequence of chat data may have only the user's tokens, which have no labels. All processes
        read the same rows, one at a time; the first row usually has a label.
        """
        batch_size, total = self.sizes.at(0).rows, sum(self.sequences_per_epoch)
        numbers = itertools.chain.from_iterable(self._first_sequences(total))
        for place, number in enumerate(numbers):
            if (self._host_sequences(np.array([number])).labels != IGNORED).any():
                return place // batch_size
        return None

    def first_sequences(self, most: int) -> np.ndarray:
        """Return the numbers of the first sequences of the stream, without those that repeat one.

        Args:     most: the maximum number. The result has fewer if all sources have fewer.
        Returns:  int64 [N], ascending, for `once`.
        """
        return np.concatenate([np.zeros(0, np.int64), *self._first_sequences(most)])

    def _first_sequences(self, most: int) -> Iterator[np.ndarray]:
        """Yield those of `first_sequences` by blocks."""
        there, start = np.array(self.sequences_per_epoch), 0
        there[[source.weight == 0 for source in self.sources]] = 0
        missing = min(most, int(there.sum()))
        while missing:
            numbers = np.arange(start, start + BLOCK)
            sources, before = np.zeros_like(numbers), numbers
            if len(self.sources) > 1:
                sources, before = self._mixture.places(numbers)
            new = numbers[before < there[sources]][:missing]
            yield new
            missing, start = missing - len(new), start + BLOCK

    def once(self, numbers: np.ndarray) -> Generator[Batch]:
        """Yield global batches of some sequences of the stream, in order, each sequence once.

        The last batch is completed by rows without labels. Batches are prepared as in `prefetched`.

        Args:     numbers: int64 [N], of sequences of `data.seq_len` tokens (`first_sequences`).
        """
        size, length = self.sizes.at(0).rows, self._cfg.data.seq_len
        own = self._rows[size]

        def rows(start: int) -> Batch:
            part = numbers[start : start + size]
            host = self._host_sequences(np.resize(part, size)[own])
            return self._ordered(self._without_labels(host, own >= len(part)), length)

        with contextlib.closing(self._prepared(rows, range(0, len(numbers), size))) as made:
            for _, host in made:
                yield self._place(0, host)

    def _host_sequences(self, numbers: np.ndarray) -> Batch:
        """Return sequences of the stream, each in text order: int32 [N, T] numpy arrays."""
        return self._packed_sequences(numbers, np.zeros_like(numbers), self._cfg.data.seq_len)

    def _without_labels(self, host: Batch, rows: np.ndarray) -> Batch:
        """Remove some rows of a batch from the loss. Args:     rows: bool [N]."""
        labels = np.where(rows[:, None], np.int32(IGNORED), host.labels)
        return dataclasses.replace(host, labels=labels)

    def _packed_sequences(self, numbers: np.ndarray, pieces: np.ndarray, length: int) -> Batch:
        """Return pieces of sequences of the mixed stream, each in text order: int32 [N, T].

        Args:     numbers, pieces: int64 [N]. length: T, tokens of a piece.
        """
        if len(self.sources) == 1:
            packed = pack(*self._source_sequences(0, numbers, pieces, length))
            return self._with_source(packed, np.zeros(len(numbers), np.int32))
        sources, before = self._mixture.places(numbers)
        shape = len(numbers), length + 1
        stretch, begins = np.empty(shape, np.int32), np.zeros(shape, bool)
        ignored = np.zeros(shape, bool) if self._has_targets else None
        for source in np.unique(sources):
            at = np.flatnonzero(sources == source)
            found = self._source_sequences(int(source), before[at], pieces[at], length)
            stretch[at], starts, spared = found
            if starts is not None:
                begins[at] = starts
            if ignored is not None and spared is not None:
                ignored[at] = spared
        packed = pack(stretch, begins if self._cfg.data.document_mask else None, ignored)
        return self._with_source(packed, sources)

    def _with_source(self, packed: Batch, sources: np.ndarray) -> Batch:
        """Add the source of each sequence, if the loss reads it."""
        if SOURCE not in self._reads:
            return packed
        of_token = np.broadcast_to(sources[:, None], packed.tokens.shape).astype(np.int32)
        return dataclasses.replace(packed, extra={SOURCE: of_token})

    @property
    def _reads(self) -> tuple[str, ...]:
        loss = self._cfg.train.loss
        return () if loss is None else loss.reads

    def _source_sequences(
        self, source: int, numbers: np.ndarray, pieces: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return the arguments of `pack` for a source: tokens, document begins, ignored tokens."""
        indices = self._sequences[source](numbers) * (self._cfg.data.seq_len // length) + pieces
        return self._sequences_at(source, indices, length)

    def _sequences_at(
        self, source: int, indices: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return the same of stretches of a source in the order of its text."""
        data, dataset, begins, ignored = self._cfg.data, self.sources[source].dataset, None, None
        stretch = dataset.windows(indices * length, length + 1)
        _check_tokens(stretch, indices, dataset)
        if data.document_mask:
            try:
                begins = document_begins(dataset.document_offsets, indices, length)
            except Disordered as error:
                raise dataset.disordered(error.args[0]) from None
        if dataset.targets is not None and self._has_targets:
            ignored = dataset.targets.windows(indices * length, length + 1) == 0
        return stretch, begins, ignored

    def prefetched(self, first_step: int = 0) -> Generator[tuple[int, Batch]]:
        """Yield (step, batch) pairs endlessly, prepared `data.prefetch` steps ahead in a thread.

        The thread only uses the host. The caller's thread transfers batches to the devices
        asynchronously, since a transfer from another thread can make cuDNN's graph capture fail
        (docs/experiments.md#cudnn-graph-capture). An exception in the thread is raised
        here, at its step. Closing or deleting the generator ends the thread after its current
        batch.
        """
        steps = itertools.count(first_step)
        with contextlib.closing(self._prepared(self._own_rows, steps)) as made:
            for step, host in made:
                yield step, self._place(step, host)

    def _prepared(
        self, rows: Callable[[int], Batch], steps: Iterable[int]
    ) -> Generator[tuple[int, Batch]]:
        """Yield each step with its rows, of which a thread makes `data.prefetch` ahead."""
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"{self.split}-batches")
        ahead: deque[tuple[int, Future[Batch]]] = deque()
        try:
            for step in steps:
                ahead.append((step, pool.submit(rows, step)))
                if len(ahead) > self._cfg.data.prefetch:
                    first, made = ahead.popleft()
                    yield first, made.result()
            for first, made in ahead:
                yield first, made.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _place(self, step: int, host: Batch) -> Batch:
        _, *shape = self.sizes.at(self.skipped.batch_of(step))
        rows = self._rows[shape[0]]
        arrays = [host.tokens, host.labels, host.segment_ids, host.positions]
        chex.assert_shape(arrays, (len(rows), shape[1]))
        chex.assert_type(arrays, np.int32)

        def to_devices(x_NT: np.ndarray) -> jax.Array:
            def shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # None only for a scalar
                # A shard's rows are contiguous in the global batch, and so in this process's.
                first, end, _ = index[0].indices(shape[0])
                local = np.searchsorted(rows, first)
                return x_NT[local : local + end - first, index[1]]

            whole = *shape, *x_NT.shape[2:]
            return jax.make_array_from_callback(whole, self._sharding, shard)

        return jax.tree.map(to_devices, host)


def source_seeds(seed: int | None, num_sources: int) -> list[int | None]:
    """Return a seed for each source: the run's seed for a single source, or derived seeds.

    With the same seed, sources of the same size would have the same permutation.
    """
    if seed is None or num_sources == 1:
        return [seed] * num_sources
    return [zlib.crc32(f"{seed} {i}".encode()) & 0x7FFF_FFFF for i in range(num_sources)]


def rows_of_process(sharding: NamedSharding, shape: tuple[int, int]) -> np.ndarray:
    """Return the rows of a global batch [B, T] that this process has devices for, ascending."""
    shards = sharding.addressable_devices_indices_map(shape).values()
    ranges = sorted({index[0].indices(shape[0]) for index in shards if index is not None})
    return np.unique(np.concatenate([np.arange(*r, dtype=np.int64) for r in ranges]))


def _checked_order(order: np.ndarray | None, seq_len: int) -> np.ndarray | None:
    if order is not None and not np.array_equal(np.sort(order), np.arange(seq_len)):
        raise ValueError(f"order must be a permutation of range({seq_len})")
    return order


def check_vocabulary(cfg: Config, dataset: TokenDataset) -> None:
    """Check that the model has every token of a dataset. Raises: ConfigError."""
    needed = dataset.vocab_size
    if needed > cfg.model.vocab_size:
        rule = f"must cover the {needed} tokens of the dataset {dataset.name}"
        if dataset.meta is None:
            rule = f"must be above token id {needed - 1}, which is in {dataset.files[0]}"
        fix = f"use --model.vocab-size {-(-needed // 128) * 128}"
        if cfg.run.init_from:  # whose weights have a vocabulary
            fix = f"prepare the text with the tokenizer of {cfg.run.init_from}"
        raise ConfigError("model.vocab_size", cfg.model.vocab_size, rule, fix)


def _check_tokens(stretch: np.ndarray, indices: np.ndarray, dataset: TokenDataset) -> None:
    """Raise ConfigError for a token outside the vocabulary, which means a damaged file."""
    # As unsigned integers, negative numbers are large: one comparison is enough.
    if stretch.view(np.uint32).max(initial=0) < dataset.vocab_size:
        return
    wrong = np.argmax(stretch.view(np.uint32) >= dataset.vocab_size)
    row, column = divmod(int(wrong), stretch.shape[1])
    token = int(indices[row]) * (stretch.shape[1] - 1) + column
    found = int(dataset.tokens[token])
    rule = f"{dataset.place(token)} is {found}, outside the vocabulary of {dataset.vocab_size}"
    raise ConfigError("data.path", dataset.name, rule, "copy the damaged file again")


# --------------------------------------------- The length of a run in passes over its training text


def with_epochs(cfg: Config) -> Config:
    """Set `train.num_tokens` to those of `train.num_epochs` passes, in place of it.

    The last pass may be a part of one. Sequences are whole.

    Raises:   ConfigError when the data cannot be opened.
    """
    if not cfg.train.num_epochs:
        return cfg
    (source,) = open_sources(cfg, TRAIN)
    each = num_sequences(source.dataset.num_tokens, cfg.data.seq_len)
    tokens = max(math.ceil(cfg.train.num_epochs * each), 1) * cfg.data.seq_len
    return replace(cfg, **{"train.num_epochs": 0.0, "train.num_tokens": tokens})


def open_loader(
    cfg: Config,
    mesh: Mesh,
    split: str = TRAIN,
    order: Callable[[int], np.ndarray | None] = lambda length: None,
) -> Loader:
    """Open the loader of a split, which the objective may choose. Args, Raises: as that one."""
    of = objective_in(cfg)
    kind = None if of is None else of.loader(split)
    return (kind or Loader)(cfg, mesh, split, order)
