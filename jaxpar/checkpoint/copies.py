"""Copies of a state in pinned host memory, and memory that is allocated for them ahead.

XLA takes pinned memory from the system in regions, which it keeps. Pinning is slow, some 2 GB/s, so
a save that needs new regions holds the loop for seconds. A region is as large as the request that
needs it, rounded up to a power of two, and at least as large as the one before; if that is enough,
the next one is twice as large (`BFCAllocator::Extend`). Left to itself, XLA takes 32 GiB for a copy
of 17. `regions` finds requests after which it has little more than it needs.
"""

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxpar.config import Config
from jaxpar.config.remat_policies import saves_on_host
from jaxpar.runtime.processes import peers

#: A state's copy takes about this many of the smallest region: the rest is at most a part of so
#: many.
PARTS = 16

#: The first region that XLA takes.
SMALLEST = 2 << 20

#: XLA divides a free block only if it leaves at least this, or is twice the request.
REMAINDER = 128 << 20


def copied_to_host(tree: Any) -> Any:
    """Copy the arrays to pinned host memory, with the same sharding. Blocks until done.

    Raises:   jax.errors.JaxRuntimeError when the memory cannot be allocated.
    """
    leaves, structure = jax.tree.flatten(tree)
    # The largest first: the others fit in what they leave.
    order = sorted(range(len(leaves)), key=lambda i: -leaves[i].nbytes)
    to = [leaves[i].sharding.with_memory_kind("pinned_host") for i in order]
    copies = jax.block_until_ready(jax.device_put([leaves[i] for i in order], to))
    return jax.tree.unflatten(structure, [copies[order.index(i)] for i in range(len(leaves))])


def copied_in_all(tree: Any) -> Any:
    """Call `copied_to_host`, and fail in all processes if it fails in one.

    Otherwise Orbax would wait for the process that failed.

    Raises:   jax.errors.JaxRuntimeError as `copied_to_host`; OSError if another process failed.
    """
    copied, error = None, None
    try:
        copied = copied_to_host(tree)
    except jax.errors.JaxRuntimeError as out_of_memory:
        error = out_of_memory
    if peers.any_process(error is not None):
        raise error or OSError("another process had no pinned host memory for its shards")
    return copied


def memory_of_saves(cfg: Config, state: Any) -> list[int]:
    """Return what the copy of a state takes, in bytes for each shard on this process's devices.

    Empty where memory is not pinned (CPUs), if the run saves nothing, and if its steps use pinned
    memory too: they would take what is allocated for saves, and XLA still more for themselves.

    Args:     state: arrays, or abstract arrays with shardings.
    """
    steps_use_it = cfg.optimizer.offload or saves_on_host(cfg.parallel)
    if jax.default_backend() != "gpu" or not cfg.checkpoint.every or steps_use_it:
        return []
    return [
        x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64))
        for x in jax.tree.leaves(state)
        for _ in x.sharding.addressable_devices
    ]


def regions(sizes: Sequence[int]) -> list[int]:
    """Return regions that hold arrays of these sizes, the largest placed first.

    Returns:  powers of two, ascending, each once: XLA takes exactly these, if each is requested in
              turn by an array of more than half its size.
    """
    unit = 1 << max(sum(sizes) // PARTS, SMALLEST).bit_length() - 1
    count = -(-sum(sizes) // unit)
    while True:
        found = [unit << bit for bit in range(count.bit_length()) if count >> bit & 1]
        if _fit(sizes, found):
            return found
        count += 1


def _fit(sizes: Sequence[int], blocks: Sequence[int]) -> bool:
    """Whether XLA places all arrays in the blocks: each in the smallest that holds it."""
    free = sorted(blocks)
    for size in sorted(sizes, reverse=True):
        at = bisect.bisect_left(free, size)
        if at == len(free):
            return False
        block = free.pop(at)
        if block >= 2 * size or block - size >= REMAINDER:
            bisect.insort(free, block - size)
    return True


class MemoryAhead:
    """Pinned memory for the copies of a state, allocated on a thread. A context manager.

    Without it, the first save would allocate the memory. On exit, it allocates no more.
    """

    def __init__(self, sizes: Sequence[int], allocate: Callable[[int], Any] | None = None):
        """
        Args:     sizes: from `memory_of_saves`. allocate: takes so many bytes of pinned memory, and
                  returns an array with them. None: `_zeros`.
        """
        self._regions = regions(sizes)
        self._allocate = allocate or _zeros
        self._held: list[Any] = []
        self._go, self._busy, self._ended = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=self._work, name="pinned memory", daemon=True)

    def begin(self) -> None:
        """Start to allocate."""
        self._go.set()
        self._thread.start()

    def _work(self) -> None:
        for size in self._regions:
            self._go.wait()
            with self._busy:
                if self._ended:
                    return
                # Without the memory, the save itself will fail, and say so.
                with contextlib.suppress(jax.errors.JaxRuntimeError, MemoryError):
                    self._held.append(self._allocate(size // 2 + 1))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Allocate nothing meanwhile. Waits for the region that is being allocated."""
        self._go.clear()
        try:
            with self._busy:
                yield
        finally:
            self._go.set()

    def ready(self) -> None:
        """Wait for all regions, and leave them to the next copy."""
        if self._thread.ident is not None:
            self._thread.join()
        for array in self._held:
            array.delete()
        self._held.clear()

    def __enter__(self) -> "MemoryAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._go.set()
        self.ready()


def _zeros(num_bytes: int) -> jax.Array:
    to = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    return jax.block_until_ready(jax.device_put(np.zeros(num_bytes, np.uint8), to))
