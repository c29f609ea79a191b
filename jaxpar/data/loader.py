"""Global batches as a pure function of (seed, step), each process reading only its own rows."""

import functools
import itertools
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.axes import BATCH_SPEC
from jaxpar.batch import Batch
from jaxpar.config import Config, ConfigError
from jaxpar.data.packing import max_documents, num_windows, windows
from jaxpar.data.tokens import TokenDataset

#: One of grain's shuffles (a 4-round cipher) leaves neighbours correlated: 0.4 for a million
#: windows. Three in a row pass for random at every size tried (tests/data/test_loader.py).
NUM_SHUFFLES = 3

#: grain's shuffle counts in 32 bits and silently repeats windows beyond them.
MAX_WINDOWS = 1 << 32


class Loader:
    """Random access to the batches of one split.

    Row r of batch s is window number s * global_batch_size + r of an endless sequence: for "train"
    the windows in a new random order each epoch, for "val" in text order, over and over.
    """

    def __init__(
        self, cfg: Config, mesh: Mesh, split: str = "train", order: np.ndarray | None = None
    ):
        """Open the dataset and check that the config can use it.

        Args:     order: int [T], a permutation of range(T) that places tokens along the sequence
                  axis: column t holds text position order[t]. None: the text's order.
        Raises:   ConfigError for a missing or damaged dataset, one without a whole window, or one
                  with more tokens in the vocabulary than the model.
        """
        self.dataset = TokenDataset.open(cfg.data.path, split)
        self._cfg, self._order = cfg, _checked_order(order, cfg.data.seq_len)
        self._shape = (cfg.train.global_batch_size, cfg.data.seq_len)
        self._sharding = NamedSharding(mesh, BATCH_SPEC)
        self._rows = _rows_of_this_process(self._sharding, self._shape)
        _check_fits(cfg, self.dataset)
        self._sequence = window_sequence(
            self.windows_per_epoch, cfg.train.seed if split == "train" else None
        )

    @property
    def windows_per_epoch(self) -> int:
        """Windows in the split: an epoch is windows_per_epoch / global_batch_size steps."""
        return num_windows(self.dataset.num_tokens, self._cfg.data.seq_len)

    @property
    def max_documents(self) -> int:
        """No window holds more segments than this; rounded up to a power of two."""
        if not self._cfg.data.document_mask:
            return 1
        dataset, seq_len = self.dataset, self._cfg.data.seq_len
        most = max_documents(dataset.document_offsets, dataset.num_tokens, seq_len)
        return 1 << (most - 1).bit_length()

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
        first, data = step * self._cfg.train.global_batch_size, self._cfg.data
        indices = np.array([self._sequence[first + int(row)] for row in rows], np.int64)
        dataset = self.dataset
        packed = windows(
            dataset.tokens, dataset.document_offsets, indices, data.seq_len, data.document_mask
        )
        if self._order is None:
            return packed
        return jax.tree.map(lambda x_NT: x_NT[:, self._order], packed)

    def prefetched(self, first_step: int = 0) -> Generator[tuple[int, Batch]]:
        """Endless (step, batch) pairs, made `data.prefetch` steps ahead on a background thread.

        The thread works on the host alone. Batches go to the devices from the caller's thread, and
        asynchronously: a transfer from elsewhere, at the moment when cuDNN captures its kernels,
        can make that fail (docs/LOG.md). An exception in the thread is raised here, at its step.
        Closing the generator, or dropping it, ends the thread after the batch in hand.
        """
        depth = self._cfg.data.prefetch
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"{self.dataset.split}-batches")
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


def window_sequence(num_windows: int, seed: int | None) -> grain.MapDataset[int]:
    """The endless order of windows, by random access.

    Args:     seed: each epoch is another permutation drawn from it. None: always in text order.
    """
    sequence = grain.MapDataset.range(num_windows)
    if seed is not None:
        sequence = sequence.seed(seed)
        for _ in range(NUM_SHUFFLES):
            sequence = sequence.shuffle()
    return sequence.repeat()


def _rows_of_this_process(sharding: NamedSharding, shape: tuple[int, int]) -> np.ndarray:
    shards = sharding.addressable_devices_indices_map(shape).values()
    ranges = {index[0].indices(shape[0]) for index in shards if index is not None}
    return np.unique(np.concatenate([np.arange(*r, dtype=np.int64) for r in ranges]))


def _checked_order(order: np.ndarray | None, seq_len: int) -> np.ndarray | None:
    if order is not None and not np.array_equal(np.sort(order), np.arange(seq_len)):
        raise ValueError(f"order must be a permutation of range({seq_len})")
    return order


def _check_fits(cfg: Config, dataset: TokenDataset) -> None:
    needed = dataset.meta.vocab_size
    if needed > cfg.model.vocab_size:
        rule = f"must cover the {needed} tokens of the dataset {cfg.data.path}"
        fix = f"use --model.vocab-size {-(-needed // 128) * 128}"
        raise ConfigError("model.vocab_size", cfg.model.vocab_size, rule, fix)
    found, seq_len = dataset.num_tokens, cfg.data.seq_len
    count = num_windows(found, seq_len)
    if count == 0:
        rule = f"needs {seq_len + 1} tokens, and {dataset.split} of {cfg.data.path} has {found}"
        raise ConfigError("data.seq_len", seq_len, rule, "use shorter windows or more text")
    if count > MAX_WINDOWS:
        rule = f"cuts {cfg.data.path} into {count:,} windows, above {MAX_WINDOWS:,}"
        raise ConfigError("data.seq_len", seq_len, rule, "use longer windows")
