"""Global batches as a pure function of (seed, step), each process reading only its own rows."""

import functools
import itertools
import zlib
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.config import Config, ConfigError
from jaxpar.data.formats.meta import TRAIN
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.mixture import Mixture
from jaxpar.data.packing import document_begins, max_documents, num_sequences, pack, stretches
from jaxpar.data.skips import SkippedBatches
from jaxpar.data.sources import open_sources
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import IGNORED, Batch

#: One of grain's shuffles (a 4-round cipher) leaves neighbors correlated: 0.4 for a million
#: sequences. Three in a row pass for random at every size tried (tests/data/test_loader.py).
NUM_SHUFFLES = 3

#: grain's shuffle counts in 32 bits and silently repeats sequences beyond them.
MAX_SEQUENCES = 1 << 32


class Loader:
    """Random access to the batches of one split.

    Step s takes batch s, or a later one if batches before it are left out (`skipped`). Row r of
    batch s is sequence number s * global_batch_size + r of an endless stream: for "train"
    the sequences come in a new random order each epoch, for "val" in text order, again and again.
    Several sources are mixed by weight (`mixture.py`), each with an endless stream of its own.
    """

    def __init__(
        self, cfg: Config, mesh: Mesh, split: str = TRAIN, order: np.ndarray | None = None
    ):
        """Open the sources and check that the config can use them.

        Args:     order: int [T], a permutation of range(T) that places tokens along the sequence
                  axis: column t holds text position order[t]. None: the text's order.
        Raises:   ConfigError for a missing or damaged source, one without a whole sequence, or one
                  with more tokens in the vocabulary than the model.
        """
        self.sources = open_sources(cfg, split)
        self.split = split
        self._cfg, self._order = cfg, _checked_order(order, cfg.data.seq_len)
        self._shape = (cfg.train.global_batch_size, cfg.data.seq_len)
        self._sharding = NamedSharding(mesh, BATCH_SPEC)
        self._rows = _rows_of_this_process(self._sharding, self._shape)
        for source in self.sources:
            _check_fits(cfg, source.dataset)
        some = any(source.dataset.targets is not None for source in self.sources)
        self._has_targets = some and cfg.data.loss_on == "targets"
        seeds = source_seeds(cfg.train.seed if split == TRAIN else None, len(self.sources))
        self._sequences = [
            sequence_order(count, seed)
            for count, seed in zip(self.sequences_per_epoch, seeds, strict=True)
        ]
        seed = cfg.train.seed if split == TRAIN else 0
        self.skipped = SkippedBatches()
        self._mixture = Mixture([source.weight for source in self.sources], seed)

    @property
    def sequences_per_epoch(self) -> list[int]:
        """Sequences in each source."""
        seq_len = self._cfg.data.seq_len
        return [num_sequences(source.dataset.num_tokens, seq_len) for source in self.sources]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(source.dataset.num_tokens for source in self.sources)

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token, by weight; None where one source does not know."""
        ratios = [source.dataset.bytes_per_token for source in self.sources]
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) < len(ratios):
            return None
        return float(np.average(known, weights=[source.weight for source in self.sources]))

    @property
    def max_documents(self) -> int:
        """No sequence holds more segments than this; rounded up to a power of two."""
        if not self._cfg.data.document_mask:
            return 1
        seq_len = self._cfg.data.seq_len
        most = max(
            max_documents(source.dataset.document_offsets, source.dataset.num_tokens, seq_len)
            for source in self.sources
        )
        return 1 << (most - 1).bit_length()

    def epochs(self, num_steps: int) -> dict[str, float]:
        """How often the first so many steps go through each source, by its path."""
        batches = self.skipped.batch_of(num_steps - 1) + 1 if num_steps else 0
        taken = self._mixture.taken(batches * self._cfg.train.global_batch_size)
        paths = [str(source.dataset.path) for source in self.sources]
        return dict(zip(paths, (taken / self.sequences_per_epoch).tolist(), strict=True))

    def batch(self, step: int) -> Batch:
        """The global batch of a step, the same whatever the mesh and the number of processes.

        Returns:  a Batch of int32 [B, T] jax arrays sharded by BATCH_SPEC.
        """
        return self._place(self.host_rows(step, self._rows))

    def _place(self, host: Batch) -> Batch:
        return jax.tree.map(self._to_devices, host)

    def host_rows(self, step: int, rows: np.ndarray) -> Batch:
        """Some rows of a step's global batch, in this process's memory.

        Args:     rows: int64 [N], each below global_batch_size.
        Returns:  a Batch of int32 [N, T] numpy arrays.
        """
        first = self.skipped.batch_of(step) * self._cfg.train.global_batch_size
        packed = self._packed_sequences(first + np.asarray(rows, np.int64))
        if self._order is None:
            return packed
        return jax.tree.map(lambda x_NT: x_NT[:, self._order], packed)

    def first_labeled(self) -> int | None:
        """The first batch with a label in it, of the first epoch; None where none has.

        Of conversations, a sequence may hold nothing but what the user says. Read row by row, the
        first of which will mostly do; by every process alike, whichever rows are its own.
        """
        batch_size = self._cfg.train.global_batch_size
        for number in range(sum(self.sequences_per_epoch)):
            step, row = divmod(number, batch_size)
            if (self.host_rows(step, np.array([row])).labels != IGNORED).any():
                return step
        return None

    def _packed_sequences(self, numbers: np.ndarray) -> Batch:
        """Sequences of the mixed stream, each in text order: int32 [N, T]."""
        if len(self.sources) == 1:
            return pack(*self._source_sequences(0, numbers))
        sources, before = self._mixture.places(numbers)
        shape = len(numbers), self._cfg.data.seq_len + 1
        stretch, begins = np.empty(shape, np.int32), np.zeros(shape, bool)
        ignored = np.zeros(shape, bool) if self._has_targets else None
        for source in np.unique(sources):
            at = np.flatnonzero(sources == source)
            stretch[at], starts, spared = self._source_sequences(int(source), before[at])
            if starts is not None:
                begins[at] = starts
            if ignored is not None and spared is not None:
                ignored[at] = spared
        return pack(stretch, begins if self._cfg.data.document_mask else None, ignored)

    def _source_sequences(
        self, source: int, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """A source's sequences as `pack` takes them: tokens, document begins, ignored tokens."""
        sequence, dataset = self._sequences[source], self.sources[source].dataset
        indices = np.array([sequence[int(number)] for number in numbers], np.int64)
        data, begins, ignored = self._cfg.data, None, None
        stretch = stretches(dataset.tokens, indices, data.seq_len)
        _check_tokens(stretch, indices, dataset)
        if data.document_mask:
            begins = document_begins(dataset.document_offsets, indices, data.seq_len)
        if dataset.targets is not None and self._has_targets:
            ignored = stretches(dataset.targets, indices, data.seq_len) == 0
        return stretch, begins, ignored

    def prefetched(self, first_step: int = 0) -> Generator[tuple[int, Batch]]:
        """Endless (step, batch) pairs, made `data.prefetch` steps ahead on a background thread.

        The thread works on the host alone. Batches go to the devices from the caller's thread, and
        asynchronously: a transfer from elsewhere, at the moment when cuDNN captures its kernels,
        can make that fail (docs/experiments/attention.md#cudnn-graph-capture). An exception in the
        thread is raised here, at its step. Closing the generator, or dropping it, ends the thread
        after the batch in hand.
        """
        depth = self._cfg.data.prefetch
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"{self.split}-batches")
        ahead: deque[Future[Batch]] = deque()
        make = functools.partial(self.host_rows, rows=self._rows)
        try:
            ahead.extend(pool.submit(make, first_step + i) for i in range(depth))
            for step in itertools.count(first_step):
                host = ahead.popleft().result()
                ahead.append(pool.submit(make, step + depth))
                yield step, self._place(host)
        finally:
            pool.shutdown(cancel_futures=True)

    def _to_devices(self, x_NT: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # It is None for a scalar only.
            rows, columns = index
            # A shard's rows are contiguous in the global batch, so they are in ours.
            first, end, _ = rows.indices(self._shape[0])
            local = np.searchsorted(self._rows, first)
            return x_NT[local : local + end - first, columns]

        return jax.make_array_from_callback(self._shape, self._sharding, shard)


def sequence_order(num_sequences: int, seed: int | None) -> grain.MapDataset[int]:
    """The endless order of sequences, by random access.

    Args:     seed: each epoch is another permutation drawn from it. None: always in text order.
    """
    sequence = grain.MapDataset.range(num_sequences)
    if seed is not None:
        sequence = sequence.seed(seed)
        for _ in range(NUM_SHUFFLES):
            sequence = sequence.shuffle()
    return sequence.repeat()


def source_seeds(seed: int | None, num_sources: int) -> list[int | None]:
    """A seed for the order of each source: the run's own for one alone, unrelated ones for more.

    With one seed for all, sources of the same size would go through the same permutation.
    """
    if seed is None or num_sources == 1:
        return [seed] * num_sources
    return [zlib.crc32(f"{seed} {i}".encode()) & 0x7FFF_FFFF for i in range(num_sources)]


def _rows_of_this_process(sharding: NamedSharding, shape: tuple[int, int]) -> np.ndarray:
    shards = sharding.addressable_devices_indices_map(shape).values()
    ranges = {index[0].indices(shape[0]) for index in shards if index is not None}
    return np.unique(np.concatenate([np.arange(*r, dtype=np.int64) for r in ranges]))


def _checked_order(order: np.ndarray | None, seq_len: int) -> np.ndarray | None:
    if order is not None and not np.array_equal(np.sort(order), np.arange(seq_len)):
        raise ValueError(f"order must be a permutation of range({seq_len})")
    return order


def _check_fits(cfg: Config, dataset: TokenDataset) -> None:
    needed = dataset.vocab_size
    if needed > cfg.model.vocab_size:
        rule = f"must cover the {needed} tokens of the dataset {dataset.path}"
        if dataset.meta is None:
            rule = f"must be above token id {needed - 1}, which is in {dataset.file}"
        fix = f"use --model.vocab-size {-(-needed // 128) * 128}"
        raise ConfigError("model.vocab_size", cfg.model.vocab_size, rule, fix)
    found, seq_len = dataset.num_tokens, cfg.data.seq_len
    count = num_sequences(found, seq_len)
    if count == 0:
        rule = f"needs {seq_len + 1} tokens, and {dataset.split} of {dataset.path} has {found}"
        raise ConfigError("data.seq_len", seq_len, rule, "use shorter sequences or more text")
    if count > MAX_SEQUENCES:
        rule = f"cuts {dataset.path} into {count:,} sequences, above {MAX_SEQUENCES:,}"
        raise ConfigError("data.seq_len", seq_len, rule, "use longer sequences")


def _check_tokens(stretch: np.ndarray, indices: np.ndarray, dataset: TokenDataset) -> None:
    """Raises:   ConfigError for a token that the dataset cannot hold: the file is damaged."""
    # As unsigned, a negative number is a large one: one comparison instead of two.
    if stretch.view(np.uint32).max(initial=0) < dataset.vocab_size:
        return
    wrong = np.argmax(stretch.view(np.uint32) >= dataset.vocab_size)
    row, column = divmod(int(wrong), stretch.shape[1])
    token = int(indices[row]) * (stretch.shape[1] - 1) + column
    found = int(dataset.tokens[token])
    rule = f"{dataset.place(token)} is {found}, beyond the vocabulary of {dataset.vocab_size}"
    raise ConfigError("data.path", str(dataset.path), rule, "the file is damaged: copy it again")
