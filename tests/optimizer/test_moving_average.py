"""The moving average of the weights: a textbook recurrence, the same on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import check, resolve
from jaxpar.model.parameters import trainable_specs
from jaxpar.prediction.shard import moment_bytes, state_bytes
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import count, partition_specs
from jaxpar.step.features import moving_average
from jaxpar.step.layer_order import rows_here
from jaxpar.step.state import (
    TrainState,
    abstract_logical,
    abstract_state,
    averaged,
    init_state,
    to_running,
)
from jaxpar.step.train_step import make_train_step
from tests.slow import slow_but
from tests.tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

BASE = replace(SMALL, **{"model.num_layers": 4, "optimizer.ema.decay": 0.5})
STAGES = {"parallel.pipeline": 2, "parallel.num_microbatches": 2, "parallel.zero": 1}
MESHES = {
    "one device": {},
    "sharded": {"parallel.data": 2, "parallel.tensor": 2},
    "stages": STAGES | {"parallel.virtual_stages": 2},
    "unequal": STAGES | {"parallel.layers_per_stage": (3, 1)},
}
STEPS = 12

#: Stands for the step of the initial average.
START = 1000


def ready(devices, **fields):
    """A resolved config and its mesh."""
    cfg = replace(BASE, **fields)
    p = cfg.parallel
    n = p.pipeline * p.data * p.tensor
    return resolve(cfg, n), make_mesh(p, devices[:n])


def weights_at(step: int, like) -> dict:
    """Weights that a step might have made, logical: a slow walk with noise."""
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda a: (0.1 * (step % 20) + rng.normal(size=a.shape)).astype(np.float32), like
    )


def average_after(devices, steps: int = STEPS, bad: int = -1, **fields) -> traces.Arrays:
    """The average after some updates, logical, by name; the one of step `bad` is skipped."""
    cfg, mesh = ready(devices, **fields)
    specs = trainable_specs(cfg)
    inside = jax.shard_map(
        lambda average, params, step, ok: moving_average.update(
            cfg, specs, average, params, step, rows_here(cfg), ok
        ),
        mesh=mesh,
        in_specs=(partition_specs(specs), partition_specs(specs), jax.P(), jax.P()),
        out_specs=partition_specs(specs),
    )
    like = abstract_logical(cfg, mesh).params
    placed = jax.tree.map(lambda leaf: leaf.sharding, like)

    def running(step: int):
        made = jax.device_put(weights_at(step, like), placed)
        return to_running(TrainState((), made, ()), cfg).params

    average, update = init_state(cfg, mesh).extra["ema"], jax.jit(inside)
    average = jax.tree.map(lambda old, new: new.astype(old.dtype), average, running(START))
    for step in range(steps):
        average = update(average, running(step), jnp.int32(step), jnp.bool_(step != bad))
    return {name: a.astype(np.float32) for name, a in traces.logical(average, cfg).items()}


def plain_average(steps: int, most: float, bad: int = -1) -> traces.Arrays:
    """The same in float64, without a mesh."""
    like = abstract_state(replace(BASE, **{"parallel.data": 1})).params

    def weights(step: int) -> traces.Arrays:
        made = traces.to_host(weights_at(step, like))
        return {name: array.astype(np.float64) for name, array in made.items()}

    average = weights(START)
    for t in range(1, steps + 1):
        if t - 1 != bad:
            d = min(most, (1 + t) / (10 + t))
            average = {n: d * average[n] + (1 - d) * w for n, w in weights(t - 1).items()}
    return average


@pytest.mark.parametrize("mesh", slow_but(["unequal"], MESHES))
def test_every_mesh_has_the_plain_average(devices, mesh):
    """In float32 to rounding; in bfloat16 with the same bits, of which many steps are no bias."""
    found, wanted = average_after(devices, **MESHES[mesh]), plain_average(STEPS, 0.5)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=2e-6)
    rounded = average_after(devices, **MESHES[mesh], **{"optimizer.ema.dtype": "bfloat16"})
    same = of_one_device(devices)
    for name in wanted:
        assert rounded[name].tobytes() == same[name].tobytes(), name
        error = rounded[name] - wanted[name]
        assert np.abs(error).max() < 0.04  # of values up to 4, whose neighbors are 1/64 apart
        if error.size > 2000:
            assert abs(error.mean()) < 4e-4, name


@functools.cache
def _rounded(devices) -> traces.Arrays:
    return average_after(devices, **{"optimizer.ema.dtype": "bfloat16"})


def of_one_device(devices) -> traces.Arrays:
    return _rounded(tuple(devices))


def test_a_skipped_update_leaves_it_bit_for_bit(devices):
    found, wanted = average_after(devices, 3, bad=1), plain_average(3, 0.5, bad=1)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=2e-6)
    last = average_after(devices, 3, bad=2)
    assert all(last[n].tobytes() == a.tobytes() for n, a in average_after(devices, 2).items())


def test_a_step_averages_the_weights_that_it_makes(devices):
    cfg, mesh = ready(devices, **{"model.num_layers": 1, "optimizer.warmup_steps": 0})
    state = init_state(cfg, mesh)
    before = traces.logical(state.extra["ema"], cfg)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    state, _ = make_train_step(cfg, mesh)(state, batch)
    found, after, d = (
        traces.logical(state.extra["ema"], cfg),
        traces.logical(state.params, cfg),
        2 / 11,
    )
    for name, old in before.items():
        assert not np.array_equal(after[name], old)
        wanted = d * old + (1 - d) * after[name]
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-6)


def test_the_decay_warms_up():
    decays = [float(moving_average.decay(0.9, jnp.int32(step))) for step in (0, 1, 79, 80, 10**6)]
    assert decays == pytest.approx([2 / 11, 3 / 12, 81 / 90, 0.9, 0.9])


def test_adapters_alone_have_an_average(devices):
    fields = {"lora.rank": 2, "optimizer.ema.dtype": "bfloat16"}
    cfg, mesh = ready(devices, **fields)
    state = init_state(cfg, mesh)
    assert traces.to_host(state.extra["ema"]).keys() == traces.to_host(trainable_specs(cfg)).keys()
    whole = averaged(state, cfg)
    assert jax.tree.structure(whole) == jax.tree.structure(state.params)
    assert {a.dtype for a in jax.tree.leaves(whole)} == {jnp.dtype("float32")}


def test_its_bytes_are_planned():
    cfg = replace(BASE, **{"optimizer.offload": True})
    without = replace(cfg, **{"optimizer.ema": None})
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        own = replace(cfg, **{"optimizer.ema.dtype": dtype})
        more = width * count(trainable_specs(cfg))
        assert state_bytes(own)[1] - state_bytes(without)[1] == more
        assert moment_bytes(own) == moment_bytes(without)  # the average stays on the device


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer.ema.decay": 1.0}, "optimizer.ema.decay = 1.0: must be above 0 and below 1"),
        ({"optimizer.ema.decay": 0.0}, r"above 0 and below 1.*--optimizer\.ema None\."),
        ({"optimizer.ema.decay": float("nan")}, "must be finite"),
        ({"optimizer.ema.dtype": "float16"}, "optimizer.ema.dtype"),
    ],
)
def test_averages_that_are_none(fields, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **fields))
