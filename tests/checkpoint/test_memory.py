"""Checkpoints of moments in bfloat16 and in host memory; and how much is read at a time."""

import asyncio
import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from orbax.checkpoint._src.serialization import limits

from jaxpar import config
from jaxpar.checkpoint import loading
from jaxpar.checkpoint import saved as checkpoint_saved
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import changed_fields, read_saved
from jaxpar.config import Config
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import trainable_specs
from jaxpar.optimizer import moments
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from tests.checkpoint.test_checkpoint import (
    DATA_2,
    TENSOR_2,
    VIRTUAL,
    assert_same_bits,
    check_donation,
    logical,
    save,
    write_dataset,
)
from tests.slow import slow
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

FIRST = {"optimizer.first_moment_dtype": "bfloat16"}
BFLOAT16 = FIRST | {"optimizer.second_moment_dtype": "bfloat16"}
OFFLOAD = {"optimizer.offload": True}
MASTERS = OFFLOAD | {"optimizer.offload_masters": True}


@pytest.fixture
def setup(tmp_path, devices):
    """(fields of the config) -> (the resolved config of a tiny run, its mesh)."""
    data = write_dataset(tmp_path / "data")
    base = config.replace(Config(), **STATE, **{"run.dir": str(tmp_path / "run")})
    base = config.replace(base, **{"data.path": data})

    def make(**values):
        cfg = config.replace(base, **(DATA_2 | values))
        n = cfg.parallel.pipeline * cfg.parallel.data * cfg.parallel.tensor
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


@pytest.mark.parametrize("fields", [slow(BFLOAT16), slow(OFFLOAD), OFFLOAD | BFLOAT16 | VIRTUAL])
def test_a_round_trip_keeps_every_bit_and_its_place(setup, fields):
    cfg, mesh = setup(**fields)
    saved = save(cfg, mesh, 3)
    restored = restore(cfg, mesh)
    assert_same_bits(restored, saved)
    assert jax.tree.map(lambda a: a.sharding, restored) == state.state_shardings(cfg, mesh)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({}, BFLOAT16),
        slow(BFLOAT16, {}),
        slow(FIRST, OFFLOAD),
        slow(OFFLOAD | BFLOAT16, FIRST),
        slow({}, OFFLOAD | VIRTUAL),
        slow({}, MASTERS),
        slow(MASTERS | VIRTUAL, TENSOR_2),
        slow(MASTERS, MASTERS | BFLOAT16 | TENSOR_2),
        (OFFLOAD | VIRTUAL | BFLOAT16, TENSOR_2),
    ],
)
def test_moments_kept_otherwise_are_converted(setup, then, now):
    """To bfloat16 by rounding to the nearest, and back exactly; wherever they lie, on any mesh."""
    cfg, mesh = setup(**then)
    saved = logical(save(cfg, mesh, 3), cfg)
    changed, other_mesh = setup(**now)
    restored = restore(changed, other_mesh)
    assert jax.tree.map(lambda a: a.sharding, restored) == state.state_shardings(
        changed, other_mesh
    )
    arrays, specs = jax.tree.map(jnp.asarray, saved.opt_state), trainable_specs(changed)
    as_kept = moments.in_storage_dtype(arrays, changed.optimizer, specs)
    wanted = dataclasses.replace(saved, opt_state=jax.device_get(as_kept))
    assert_same_bits(logical(restored, changed), wanted)


def test_the_change_is_told(setup):
    """`train` prints every one of these before it goes on."""
    cfg, mesh = setup()
    save(cfg, mesh, 3)
    changed, _ = setup(**BFLOAT16, **OFFLOAD)
    told = changed_fields(changed, read_saved(cfg.run.dir))
    assert told == {path: ("float32", "bfloat16") for path in BFLOAT16} | {
        "optimizer.offload": (False, True)
    }


def test_another_compute_dtype_begins_with_its_own_loss_scale(setup):
    cfg, mesh = setup(**{"compute.dtype": "float32"})
    saved = save(cfg, mesh, 4)
    half = config.replace(cfg, **{"compute.dtype": "float16", "guard.loss_scale": 512.0})
    guard = restore(half, mesh).extra["guard"]
    assert float(guard["loss_scale"]) == 512
    assert int(guard["skipped"]) == int(saved.extra["guard"]["skipped"])


def test_a_checkpoint_from_before_these_fields_holds_float32(setup, monkeypatch):
    cfg, mesh = setup()
    saved = logical(save(cfg, mesh, 3), cfg)
    read = checkpoint_saved.read_saved

    def read_old(run_dir, step=None):
        found = read(run_dir, step)
        for path in (*BFLOAT16, *OFFLOAD):
            del found.config["optimizer"][path.split(".")[1]]
        return found

    monkeypatch.setattr(loading, "read_saved", read_old)
    changed, _ = setup(**BFLOAT16)
    arrays, specs = jax.tree.map(jnp.asarray, saved.opt_state), trainable_specs(changed)
    as_kept = moments.in_storage_dtype(arrays, changed.optimizer, specs)
    restored = restore(changed, mesh)
    assert_same_bits(logical(restored, changed).opt_state, jax.device_get(as_kept))


@pytest.mark.parametrize("more", [{}, slow(VIRTUAL)], ids=["", "virtual stages"])
def test_donating_offloaded_moments_right_after_save_leaves_the_save_alone(setup, more):
    check_donation(*setup(**{"model.vocab_size": 65536}, **OFFLOAD, **more))


@pytest.mark.gpu
def test_donating_offloaded_moments_right_after_save_on_a_gpu(setup):
    size = {"model.vocab_size": 1 << 22, "parallel.data": 1}  # 1 GiB of moments
    check_donation(*setup(**size, **OFFLOAD))


# ------------------------------------------------------------------- what is read at a time


def test_a_checkpoint_is_read_shard_by_shard(setup, monkeypatch):
    """Every read is of one device's shard, and few are under way at a time."""
    cfg, mesh = setup(**{"model.vocab_size": 4096})
    save(cfg, mesh, 1)
    reads = Reads()
    monkeypatch.setattr(limits, "LimitInFlightBytes", reads.limiter)
    monkeypatch.setattr(loading, "READ_AHEAD", 1)
    restored = jax.tree.leaves(restore(cfg, mesh))
    shards = {math.prod(a.sharding.shard_shape(a.shape)) * 4 for a in restored}
    largest = max(a.nbytes for a in restored)
    assert reads.sizes and set(reads.sizes) <= shards
    assert max(reads.sizes) == largest // 2  # of two devices
    assert reads.limit == 1 + largest >= reads.most_at_once


@dataclasses.dataclass
class Reads:
    """What Orbax reads, at the point where it asks for room."""

    limit: int = 0
    sizes: list[int] = dataclasses.field(default_factory=list)
    now: int = 0
    most_at_once: int = 0

    def limiter(self, num_bytes: int):
        self.limit = num_bytes
        limiter = LIMITER(num_bytes)
        wait, release = limiter.wait_for_bytes, limiter.release_bytes

        async def wait_for_bytes(size: int) -> None:
            await wait(size)
            self.sizes.append(size)
            self.now += size
            self.most_at_once = max(self.most_at_once, self.now)
            await asyncio.sleep(0)

        async def release_bytes(size: int) -> None:
            self.now -= size
            await release(size)

        limiter.wait_for_bytes, limiter.release_bytes = wait_for_bytes, release_bytes
        return limiter


LIMITER = limits.LimitInFlightBytes
