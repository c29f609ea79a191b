"""Memory for the copies of saves: how much is taken ahead, when, and how the work is stopped."""

import bisect
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.checkpoint import copies
from jaxpar.checkpoint.copies import MemoryAhead, copied_to_host, memory_of_saves, regions
from jaxpar.config import Config, replace

GIB = 1 << 30

#: Shards of the benchmarks' 1.5B: 1.5 billion parameters, and two moments of each.
SHARDS_1_5B = [int(GIB * part) for part in (1, 1, 1, 0.98, 0.98, 0.25, 0.25, 0.0625, 0.0625)] * 3


class Xla:
    """Regions and free blocks of XLA's allocator (tsl/framework/bfc_allocator.cc)."""

    def __init__(self):
        self.next, self.regions, self.free = 2 << 20, list[int](), list[int]()

    def allocate(self, size: int) -> None:
        at = bisect.bisect_left(self.free, size)
        if at == len(self.free):
            enlarged = size > self.next
            while size > self.next:
                self.next *= 2
            self.regions.append(self.next)
            bisect.insort(self.free, self.next)
            self.next *= 1 if enlarged else 2
            at = bisect.bisect_left(self.free, size)
        block = self.free.pop(at)
        if block >= 2 * size or block - size >= 128 << 20:
            bisect.insort(self.free, block - size)

    def free_all(self) -> None:
        self.free = sorted(self.regions)


@pytest.mark.parametrize("seed", range(40))
def test_a_copy_needs_no_memory_that_was_not_allocated_ahead(seed):
    draw = random.Random(seed)
    sizes = [int(2 ** draw.uniform(20, 32)) for _ in range(draw.randint(3, 60))]
    if seed == 0:
        sizes = SHARDS_1_5B
    xla = Xla()
    for size in regions(sizes):
        xla.allocate(size // 2 + 1)
    assert xla.regions == regions(sizes)
    for _ in range(3):
        xla.free_all()
        for size in sorted(sizes, reverse=True):
            xla.allocate(size)
        assert xla.regions == regions(sizes)


def test_little_more_than_the_copy_is_allocated():
    assert [size / GIB for size in regions(SHARDS_1_5B)] == [1, 16]
    xla = Xla()
    for size in SHARDS_1_5B:
        xla.allocate(size)
    assert sum(xla.regions) > 31 * GIB  # without it
    assert regions([]) == []


class Array:
    """Stands for an array in pinned memory."""

    def __init__(self):
        self.deleted = False

    def delete(self) -> None:
        self.deleted = True


def test_memory_is_held_until_it_is_needed():
    taken: list[tuple[int, Array]] = []

    def allocate(size: int) -> Array:
        taken.append((size, Array()))
        return taken[-1][1]

    with MemoryAhead(SHARDS_1_5B, allocate) as memory:
        memory.begin()
        memory.ready()
        assert [size for size, _ in taken] == [GIB // 2 + 1, 8 * GIB + 1]
        assert all(array.deleted for _, array in taken)
        memory.ready()  # of the second save
    assert len(taken) == 2


@pytest.fixture
def slow_memory():
    """Memory of three regions: (it, a region has begun, let a region end)."""
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def allocate(size: int) -> Array:
        begun.release()
        assert go_on.acquire(timeout=60)
        return Array()

    memory = MemoryAhead([GIB] * 7, allocate)
    assert len(regions([GIB] * 7)) == 3
    return memory, begun, go_on


def test_a_programs_first_run_waits_for_one_region_and_has_the_devices_alone(slow_memory):
    memory, begun, go_on = slow_memory
    alone, done = threading.Event(), threading.Event()

    def first_run() -> None:
        with memory.paused():
            alone.set()
            assert done.wait(60)

    with memory:
        memory.begin()
        assert begun.acquire(timeout=60)
        runs = threading.Thread(target=first_run)
        runs.start()
        assert not alone.wait(0.1)
        go_on.release()
        assert alone.wait(60)
        assert not begun.acquire(timeout=0.1)
        done.set()
        assert begun.acquire(timeout=60)
        runs.join()
        go_on.release(2)
        memory.ready()


def test_a_run_that_ends_waits_for_one_region_only(slow_memory):
    memory, begun, go_on = slow_memory
    with memory:
        memory.begin()
        assert begun.acquire(timeout=60)
        threading.Timer(0.1, go_on.release).start()
    assert not begun.acquire(blocking=False)


def test_without_memory_the_save_says_so():
    def refuse(size: int) -> Array:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no pinned memory")

    with MemoryAhead(SHARDS_1_5B, refuse) as memory:
        memory.begin()
        memory.ready()


def test_a_run_that_has_no_use_for_it_allocates_nothing(monkeypatch):
    state = {"w": jnp.zeros((4, 8))}
    assert memory_of_saves(Config(), state) == []  # CPUs
    monkeypatch.setattr(copies.jax, "default_backend", lambda: "gpu")
    assert memory_of_saves(Config(), state) == [128]
    for fields in ({"checkpoint.every": 0}, {"optimizer.offload": True}):
        assert memory_of_saves(replace(Config(), **fields), state) == []
    with_values_on_host = replace(Config(), **{"parallel.remat": "attn_out:host"})
    assert memory_of_saves(with_values_on_host, state) == []


def test_a_copy_keeps_the_order_of_the_tree():
    tree = {"a": jnp.arange(3), "b": (jnp.arange(60.0), jnp.int32(7)), "c": jnp.arange(5)}
    copy = copied_to_host(tree)
    jax.tree.map(np.testing.assert_array_equal, copy, tree)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(copy)} == {"pinned_host"}
