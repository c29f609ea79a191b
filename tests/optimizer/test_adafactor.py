"""Adafactor: on one device the updates of optax for each matrix, on a mesh those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.certification import distances
from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import check
from jaxpar.model.parameters import param_specs
from jaxpar.optimizer.adafactor import cut_of, scale_by_adafactor
from jaxpar.optimizer.matrices import Matrices
from jaxpar.sharding.params import abstract, count, flat
from jaxpar.step.state import abstract_state, init_state
from tests.optimizer.test_muon import on_mesh
from tests.optimizer.updates import gradients, weights_after
from tests.tiny import EXPERTS, GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

STEPS = 3

MODEL = {
    "optimizer.name": "adafactor",
    "model.layers.feed_forward": EXPERTS,
    "model.layers.mixer.bias": True,
}


def by_optax(spec, grads: list[np.ndarray]) -> np.ndarray:
    """optax's update of every matrix or vector of a parameter by itself, after some steps."""
    cut, lead = cut_of(spec), spec.lead
    shape: tuple[int, ...] = (int(np.prod(spec.shape[lead:])),)
    if cut < len(spec.shape):
        shape = int(np.prod(spec.shape[lead:cut])), int(np.prod(spec.shape[cut:]))
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=1, epsilon=1e-30)
    rule = optax.chain(factored, optax.clip_by_block_rms(1.0))
    every = [np.reshape(g, (-1, *shape)) for g in grads]

    def steps(*gs):
        state = rule.init(jnp.zeros(shape))
        for g in gs:
            updates, state = rule.update(g, state, jnp.zeros(shape))
        return updates

    return np.asarray(jax.jit(jax.vmap(steps))(*every)).reshape(spec.shape)


def test_one_device_computes_the_updates_of_optax():
    """optax factors an array's two largest dims, whatever they mean: it gets single matrices."""
    cfg = replace(TINY, **MODEL, **{"optimizer.beta1": 0.0, "optimizer.beta2": 0.999})
    specs = param_specs(cfg.model)
    rule = scale_by_adafactor(cfg.optimizer, Matrices(specs))
    grads = [gradients(abstract(specs), i) for i in range(STEPS)]
    state, update = rule.init(grads[0]), jax.jit(rule.update)
    for g in grads:
        found, state = update(g, state)
    found = flat(found)
    for name in ("embed", "layers/wq", "layers/wo", "layers/w_up", "layers/bq", "final_norm"):
        wanted = by_optax(flat(specs)[name], [flat(g)[name] for g in grads])
        error = np.abs(found[name] - wanted).max() / np.abs(wanted).max()
        assert error < 1e-5, name


def test_an_expert_is_updated_by_its_own_gradients():
    """Each has its matrices and its biases, which are factored, and clipped, by themselves."""
    bias = {"model.layers.feed_forward.expert.bias": True}
    cfg = replace(TINY, **MODEL, **bias, **{"optimizer.beta1": 0.0})
    specs = param_specs(cfg.model)
    rule, grads = scale_by_adafactor(cfg.optimizer, Matrices(specs)), gradients(abstract(specs), 0)
    kinds = [f"{kind}_{name}" for kind in "wb" for name in ("gate", "up", "down")]
    layers = grads["layers"] | {name: grads["layers"][name].copy() for name in kinds}
    for name in kinds:
        layers[name][:, 1:] *= 1e6  # updates above 1, which are clipped
    _, state = rule.update(gradients(abstract(specs), 1), rule.init(grads))
    both = (grads, grads | {"layers": layers})
    one, other = (rule.update(g, state)[0]["layers"] for g in both)
    for name in kinds:
        np.testing.assert_array_equal(one[name][:, 0], other[name][:, 0], err_msg=name)
        assert (one[name][:, 1] != other[name][:, 1]).any(), name


@pytest.mark.slow  # quicker: test_muon.py
@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("replica=2,data=2,tensor=2", {"model.layers.feed_forward": GLU}),
        ("replica=2,data=2,expert=2,tensor=2", {}),
        ("pipeline=2,data=2,sequence=2,num_microbatches=2,zero=1", {}),
        ("pipeline=2,layers_per_stage=3,1,num_microbatches=2", {"model.num_layers": 4}),
        ("data=2,tensor=2", {"optimizer.first_moment_dtype": "bfloat16"}),
        ("data=2,tensor=2", {"optimizer.beta1": 0.0}),
    ],
)
def test_a_mesh_computes_the_updates_of_one_device(mesh, fields, devices):
    cfg = replace(TINY, **(MODEL | fields))
    found, wanted = (weights_after(*on_mesh(cfg, m, devices), STEPS) for m in (mesh, "data=1"))
    errors = distances.update_errors(found[-1], wanted[-1], wanted[0])
    assert distances.worst(errors)[0] < 1e-5


def test_second_moments_are_vectors(devices):
    cfg, mesh = on_mesh(replace(TINY, **MODEL, **{"optimizer.beta1": 0.0}), "data=2", devices)
    specs = flat(param_specs(cfg.model))
    state = init_state(cfg, mesh).opt_state
    shapes = {n: a.shape for n, a in flat(state[0].nu_rows).items()}
    assert shapes["layers/wq"] == (2, 16) and shapes["layers/w_down"] == (2, 4, 24)
    assert flat(state[0].nu_columns)["layers/wq"].shape == (2, 4, 4)
    assert "layers/bq" not in shapes and "layers/bq" in flat(state[0].nu)
    kept = sum(a.size for a in jax.tree.leaves(state))
    assert kept < 0.2 * count(list(specs.values()))


def test_what_cannot_be():
    check(replace(TINY, **MODEL))
    with pytest.raises(ConfigError, match=r"'adafactor': is not supported with optimizer\.offload"):
        check(replace(TINY, **MODEL, **{"optimizer.offload": True}))
    without = {"optimizer.beta1": 0.0, "optimizer.first_moment_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"first_moment_dtype.*no moment named mu"):
        abstract_state(replace(TINY, **MODEL, **without))
    with pytest.raises(ConfigError, match=r"second_moment_dtype.*adafactor"):
        check(replace(TINY, **MODEL, **{"optimizer.second_moment_dtype": "bfloat16"}))
