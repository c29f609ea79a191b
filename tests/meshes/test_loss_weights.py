"""Weights of losses by step: the plain model's gradients with the weights of the step."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.certification.small_config import steady
from jaxpar.config import ConfigError, LossWeight, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.lists.weight_schedules import MTP_LOSS, Z_LOSS, weight_at, with_weights_of
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.staged import loss_weights
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_train_step
from tests import weights
from tests.meshes.test_experts import compare
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

BY_STEP = {
    Z_LOSS: (LossWeight(0, 0.1), LossWeight(4, 0.02)),
    MTP_LOSS: (LossWeight(0, 0.5), LossWeight(2, 0.5), LossWeight(4, 0.1)),
}
MODULES = {"model.mtp_depth": 1}


@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 1000])
def test_weights_are_on_straight_lines(step):
    cfg = replace(TINY, **BY_STEP)
    wanted = [0.1 - 0.02 * min(step, 4), {3: 0.3}.get(step, 0.5 if step < 3 else 0.1)]
    assert [weight_at(cfg, path, step) for path in BY_STEP] == pytest.approx(wanted)
    assert list(loss_weights(cfg, jnp.int32(step))) == pytest.approx(wanted)
    assert loss_weights(TINY, jnp.int32(step)) == (0.0, 0.1)


@pytest.mark.slow  # quicker: test_mtp.py; weights on straight lines, above
@pytest.mark.parametrize(
    "mesh",
    [
        "pipeline=2,num_microbatches=2,tensor=2,zero=1",
        "pipeline=2,num_microbatches=2,tensor=2,zero=1,layer_loop=unroll",
        "data=2,sequence=2,tensor=2",
        "data=2,num_microbatches=2,zero=2,layer_loop=unroll",
        "data=1",
    ],
)
def test_gradients(mesh, devices):
    cfg = replace(TINY, **BY_STEP, **MODULES)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch = traces.random_batch(cfg, 0)
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    wanted = weights.plain_gradients(with_weights_of(cfg, 0), batch)
    assert not distances.compare(found, wanted, 1e-5).mismatches()


@pytest.mark.slow
def test_another_steps_weights_give_other_gradients():
    cfg, batch = replace(TINY, **BY_STEP, **MODULES), traces.random_batch(TINY, 0)
    first, later = (weights.plain_gradients(with_weights_of(cfg, step), batch) for step in (0, 4))
    assert distances.compare(first, later, 1e-5).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,sequence=2", "pipeline=2,num_microbatches=2"])
def test_steps(mesh, devices):
    """Weights of the model after five steps, each with other weights of losses."""
    found = compare(mesh, steady(replace(TINY, **BY_STEP, **MODULES)), devices, steps=5)
    assert found.update is not None and not found.mismatches()


@pytest.mark.slow
def test_a_step_has_the_weights_of_its_number(devices):
    plain = {"optimizer.name": "sgd", "optimizer.schedule": "constant"}
    cfg = resolve(replace(TINY, **BY_STEP, **MODULES, **plain), 1)
    mesh = make_mesh(cfg.parallel, devices[:1])
    batch = traces.shard_batch(traces.random_batch(cfg, 0), cfg, mesh)
    at = lambda: dataclasses.replace(init_state(cfg, mesh), step=jax.device_put(jnp.int32(3)))  # noqa: E731
    found, _ = make_train_step(cfg, mesh)(at(), batch)
    wanted, _ = make_train_step(with_weights_of(cfg, 3), mesh)(at(), batch)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(wanted.params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({Z_LOSS: "0.1"}, "z_loss_schedule = .*must be a list of STEP:WEIGHT"),
        ({Z_LOSS: "0:x"}, "but 'x' is not a number"),
        ({Z_LOSS: "5:0.1,5:0"}, "has the step 5 twice"),
        ({Z_LOSS: "-1:0.1"}, r"z_loss_schedule\[0\]\.step = -1: must not be negative"),
        ({Z_LOSS: f"0:0.1,{10**30}:0"}, "at most 2,147,483,647"),
        ({Z_LOSS: "0:-0.1"}, r"z_loss_schedule\[0\]\.weight = -0\.1: must not be negative"),
        ({Z_LOSS: "0:inf"}, "must be finite"),
        ({Z_LOSS: "0:0,9:0"}, "must have a weight above 0"),
        ({Z_LOSS: ",".join(f"{n}:1" for n in range(101))}, "101 items, more than 100"),
        ({Z_LOSS: "0:0.1", "train.z_loss": 0.5}, "z_loss = 0.5: is not supported with"),
        ({MTP_LOSS: "0:0.1", "train.mtp_loss": 0.5}, "mtp_loss = 0.5: is not supported with"),
        ({MTP_LOSS: "0:0.1", "model.mtp_depth": 0}, "mtp_loss_schedule = .*, but model.mtp_depth"),
    ],
)
def test_a_bad_schedule_is_one_error(fields, said):
    with pytest.raises(ConfigError, match=said):
        words = [f"--{path}={value}" for path, value in (MODULES | fields).items()]
        check(parse_overrides(TINY, words))
