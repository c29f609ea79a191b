"""Updates with a non-finite loss or gradient are skipped, on every mesh; float16's loss scale."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.optimizer import loss_scale
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from jaxpar.step.train_step import make_train_step
from tests.slow import slow
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

TINY = STATE | {
    "compute.dtype": "float32",
    "data.seq_len": 8,
    "train.global_batch_size": 4,
    "optimizer.warmup_steps": 2,
    "optimizer.learning_rate": 1e-2,
}
MESHES = {
    "one": {"parallel.data": 1},
    "fsdp": {"parallel.data": 2, "parallel.replica": 2},
    "tensor": {"parallel.tensor": 2, "parallel.data": 1},
    "pipeline": {
        "parallel.pipeline": 2,
        "parallel.virtual_stages": 2,
        "parallel.num_microbatches": 2,
        "parallel.zero": 1,
        "parallel.data": 1,
    },
}
OPTIMIZERS = {
    "adamw": {},
    "sgd": {"optimizer.name": "sgd"},
    "muon": {"optimizer.name": "muon"},
    "adafactor": {"optimizer.name": "adafactor"},
    "lion in bfloat16": {
        "optimizer.name": "lion",
        "optimizer.first_moment_dtype": "bfloat16",
    },
    "offloaded": {"optimizer.offload": True},
}

#: A token whose embedding is NaN, and that only a bad batch holds.
POISON = 31


def make(devices, **values):
    """(the config, its step, () -> a state in which a token is poisoned)."""
    cfg = replace(Config(), **(TINY | values))
    p = cfg.parallel
    n = p.pipeline * p.replica * p.data * p.tensor
    cfg = resolve(cfg, n)
    mesh = make_mesh(cfg.parallel, devices[:n])

    def fresh():
        now = state.init_state(cfg, mesh)
        embed = now.params["embed"]
        bad = jax.jit(lambda a: a.at[POISON].set(jnp.nan), out_shardings=embed.sharding)(embed)
        return dataclasses.replace(now, params=now.params | {"embed": bad})

    return cfg, make_train_step(cfg, mesh), fresh


def batch(cfg: Config, seed: int, bad: bool = False) -> Batch:
    tokens = np.random.default_rng(seed).integers(0, POISON, (4, cfg.data.seq_len + 1), np.int32)
    if bad:
        tokens[2, 3] = POISON
    ones = np.ones((4, cfg.data.seq_len), np.int32)
    places = np.broadcast_to(np.arange(cfg.data.seq_len, dtype=np.int32), ones.shape)
    return Batch(tokens[:, :-1], tokens[:, 1:], ones, places)


def run(cfg, step, now, kinds: str):
    """A step for each letter, g for a good batch and b for a bad one; good batches in order."""
    number, seen = 0, []
    for kind in kinds:
        now, measured = step(now, batch(cfg, number, bad=kind == "b"))
        number += kind == "g"
        seen.append(jax.device_get(measured))
    return jax.device_get(now), seen


def raw(tree):
    """Every array as bytes: NaN equals itself."""
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


CASES = [
    ("fsdp", "adamw"),
    slow("fsdp", "offloaded"),
    slow("pipeline", "adamw"),
    slow("fsdp", "sgd"),
    slow("fsdp", "lion in bfloat16"),
    slow("tensor", "muon"),
    slow("fsdp", "adafactor"),
    slow("tensor", "adamw"),
]


@pytest.mark.parametrize(("mesh", "optimizer"), CASES)
def test_a_bad_batch_changes_nothing_but_the_counters(devices, mesh, optimizer):
    values = MESHES[mesh] | OPTIMIZERS[optimizer]
    cfg, step, fresh = make(devices, **values)
    with_bad, seen = run(cfg, step, fresh(), "gbg")
    assert [int(m["skipped"]) for m in seen] == [0, 1, 1]
    assert [int(m["in_a_row"]) for m in seen] == [0, 1, 0]
    assert not np.isfinite(seen[1]["loss"]) and np.isfinite(seen[2]["loss"])
    assert int(with_bad.step) == 3 and int(with_bad.extra["guard"]["skipped"]) == 1
    without, _ = run(cfg, step, fresh(), "gg")
    if optimizer != "lion in bfloat16":  # whose rounding is drawn by the step's number
        assert raw(with_bad.params) == raw(without.params)
        assert raw(with_bad.opt_state) == raw(without.opt_state)
    first = jax.device_get(fresh())
    before = raw((first.params, first.opt_state))
    after, _ = run(cfg, step, fresh(), "bb")
    assert raw((after.params, after.opt_state)) == before
    assert int(after.extra["guard"]["in_a_row"]) == 2


@pytest.mark.slow
def test_the_choice_costs_no_pass_over_memory(devices):
    """The update reads the old state anyway: nothing is copied, and all of it is taken over."""
    cfg, step, fresh = make(devices, **MESHES["one"])
    now = fresh()
    memory = step.lower(now, batch(cfg, 0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= state.bytes_per_device(now)


# --------------------------------------------------------------------------------- float16

FLOAT16 = {"compute.dtype": "float16", "guard.loss_scale_interval": 2}


@pytest.mark.parametrize("mesh", ["fsdp", slow("pipeline")])
def test_float16_learns_as_float32_does(devices, mesh):
    found, norms = {}, []
    for dtype in ("float16", "float32"):
        cfg, step, fresh = make(devices, **MESHES[mesh], **{"compute.dtype": dtype})
        _, seen = run(cfg, step, fresh(), "gggggg")
        found[dtype] = [float(m["loss"]) for m in seen]
        norms += [float(m["grad_norm"]) for m in seen if int(m["skipped"]) == 0][:1]
    np.testing.assert_allclose(norms[0], norms[1], rtol=0.02)  # without the loss scale
    assert found["float16"][-1] < found["float16"][0]
    np.testing.assert_allclose(found["float16"], found["float32"], rtol=5e-3)


def test_the_scale_falls_with_overflow_and_rises_without(devices):
    values = FLOAT16 | {"guard.loss_scale": 2.0**24, "guard.max_skips": 1}
    cfg, step, fresh = make(devices, **MESHES["fsdp"], **values)
    now, seen = run(cfg, step, fresh(), "g" * 12)
    scales = [float(m["loss_scale"]) for m in seen]
    assert scales[0] == 2.0**24 and min(scales) < 2.0**24  # that was too large
    left_out = int(now.extra["guard"]["skipped"])
    assert 0 < left_out < 12 and int(now.extra["guard"]["in_a_row"]) == 0
    assert all(b in (a / 2, a, 2 * a) for a, b in itertools.pairwise(scales))
    assert any(b == 2 * a for a, b in itertools.pairwise(scales))
    assert all(int(m["in_a_row"]) == 0 for m in seen)  # overflow is not held against the run


@pytest.mark.slow
def test_at_scale_1_an_overflow_counts(devices):
    cfg, step, fresh = make(devices, **MESHES["one"], **FLOAT16, **{"guard.loss_scale": 1.0})
    now, seen = run(cfg, step, fresh(), "bb")
    assert [int(m["in_a_row"]) for m in seen] == [1, 2]
    assert float(now.extra["guard"]["loss_scale"]) == 1.0


def test_the_scalars_are_of_the_state(devices):
    cfg = replace(Config(), **TINY)
    assert set(loss_scale.initial_guard(cfg)) == set(state.abstract_state(cfg).extra["guard"])
