"""µP's learning rates: the updates are those of plain rules, each with its own rate."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.config import Config, replace
from jaxpar.model.parameters import param_specs
from jaxpar.optimizer.matrices import Matrices
from jaxpar.optimizer.rules import adamw, lion, make_optimizer
from jaxpar.sharding.params import abstract, decay_mask, flat
from tests.model.test_mup import WIDE
from tests.optimizer.updates import gradients
from tests.slow import slow
from tests.tiny import EXPERTS, GLU, TINY

STEPS, RATE, DECAY = 2, 1e-2, 0.1

#: Inputs relative to the base model, of the parameters that have more.
INPUTS = {"wq": 2, "wk": 2, "wv": 2, "wo": 2, "w_gate": 2, "w_up": 2, "w_down": 3, "router": 2}


def configured(name: str) -> Config:
    experts = {"model.layers.feed_forward": EXPERTS, "model.layers.mixer.bias": True}
    rule = {"optimizer.name": name, "optimizer.eps": 1e-2, "optimizer.weight_decay": DECAY}
    rate = {"optimizer.learning_rate": RATE, "optimizer.schedule": "constant"}
    return replace(TINY, **WIDE, **experts, **rule, **rate)


def updates(rule: optax.GradientTransformation, params, grads) -> list:
    """The updates of some steps in which the parameters do not move."""
    state, step, found = rule.init(params), jax.jit(rule.update), []
    for g in grads:
        u, state = step(g, state, params)
        found.append(flat(u))
    return found


@pytest.mark.parametrize("name", [slow("lion"), "adafactor"])
def test_the_rate_is_divided_by_the_inputs_and_decay_is_not(name):
    cfg = configured(name)
    specs = param_specs(cfg.model)
    plain, mask = param_specs(replace(cfg, **{"model.mup": None}).model), flat(decay_mask(specs))
    grads = [gradients(abstract(specs), i) for i in range(STEPS)]
    params = jax.tree.map(lambda g: jnp.full(g.shape, 0.5), grads[0])
    found, unscaled = (
        updates(make_optimizer(cfg.optimizer, 10, of), params, grads) for of in (specs, plain)
    )
    for path, value in flat(params).items():
        decay = -RATE * DECAY * np.asarray(value) * mask[path]
        wider = INPUTS.get(path.rpartition("/")[2], 1)
        for f, u in zip(found, unscaled, strict=True):
            np.testing.assert_allclose(f[path] - decay, (u[path] - decay) / wider, atol=1e-7)


def test_adamw():
    """Each parameter with a rate, a decay and an eps of its own."""
    cfg = configured("adamw")
    o, specs = cfg.optimizer, param_specs(cfg.model)
    grads = [gradients(abstract(specs), i) for i in range(STEPS)]
    params = jax.tree.map(lambda g: jnp.full(g.shape, 0.5), grads[0])
    found = updates(make_optimizer(o, 10, specs), params, grads)
    for path, spec in flat(specs).items():
        wider = INPUTS.get(path.rpartition("/")[2], 1)
        decay, eps = DECAY * wider * spec.decay, o.eps / (4 if "/" in path else 2)
        mu = nu = np.zeros(spec.shape)
        for i, (f, g) in enumerate(zip(found, grads, strict=True), 1):
            g = np.asarray(flat(g)[path], np.float64)
            mu = o.beta1 * mu + (1 - o.beta1) * g
            nu = o.beta2 * nu + (1 - o.beta2) * g**2
            first, second = mu / (1 - o.beta1**i), nu / (1 - o.beta2**i)
            wanted = -RATE / wider * (first / (np.sqrt(second) + eps) + decay * 0.5)
            np.testing.assert_allclose(f[path], wanted, rtol=1e-4, atol=1e-8, err_msg=path)


@pytest.mark.parametrize("size", ["rms", "width"])
def test_muon(size):
    """The norm of an update, from RMS to RMS, is that of the base model's matrix."""
    fields = {"optimizer.muon_scale": size, "optimizer.weight_decay": 0.0}
    none = replace(configured("muon"), **fields, **{"model.layers.feed_forward": GLU})
    base = {"model.d_model": 8, "model.layers.mixer.head_dim": 2, "model.mup": None}
    base["model.layers.feed_forward.d_ff"] = 8
    norms = []
    for of in (none, replace(none, **base)):
        specs = param_specs(of.model)
        grads = [gradients(abstract(specs), 0)]
        params = jax.tree.map(jnp.zeros_like, grads[0])
        (found,) = updates(make_optimizer(of.optimizer, 10, specs), params, grads)
        sizes = {}
        for path, spec in flat(specs).items():
            if spec.columns:
                rows, columns = spec.matrix
                matrix = np.asarray(found[path])[0].reshape(rows, columns)
                values = np.linalg.svd(matrix, compute_uv=False)
                sizes[path] = np.sqrt(np.mean(values**2)) * math.sqrt(rows / columns)
        norms.append(sizes)
    wide, narrow = norms
    for path, size_of in wide.items():
        assert size_of == pytest.approx(narrow[path], rel=0.15), path  # Newton-Schulz: 0.7 to 1.2


def test_without_widths_rules_are_those_of_optax():
    specs = param_specs(TINY.model)
    grads, mask = [gradients(abstract(specs), i) for i in range(2)], decay_mask(specs)
    o, params = TINY.optimizer, jax.tree.map(jnp.ones_like, gradients(abstract(specs), 9))
    betas = {"b1": o.beta1, "b2": o.beta2, "weight_decay": o.weight_decay, "mask": mask}
    for ours, theirs in (
        (adamw, optax.adamw(RATE, eps=o.eps, **betas)),
        (lion, optax.lion(RATE, **betas)),
    ):
        rule = ours(o, lambda _: RATE, mask, Matrices(specs))
        found, wanted = (updates(one, params, grads)[-1] for one in (rule, theirs))
        chex.assert_trees_all_equal(found, wanted)
