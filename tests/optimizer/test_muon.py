"""Muon: on one device the update of optax, on a mesh that of one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from jaxpar.certification import distances
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Config, ConfigError, LatentAttention, OptimizerConfig, replace
from jaxpar.config.validate import check, resolve
from jaxpar.extend import UpdateRule
from jaxpar.model.parameters import param_specs, trainable_specs
from jaxpar.optimizer.muon import orthogonalize, scale
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import ParamSpec, abstract, count, decay_mask, flat, map_specs
from jaxpar.step.state import abstract_state, bytes_per_device, init_state
from tests.optimizer.updates import gradients, weights_after
from tests.slow import slow
from tests.tiny import EXPERTS, GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

STEPS = 3

MUON = {"optimizer.name": "muon", "optimizer.muon_dtype": "float32", "optimizer.learning_rate": 0.1}

#: A model with experts, biases, and every shape of matrix.
MODEL = MUON | {
    "model.layers.mixer.bias": True,
    "model.layers.feed_forward": dataclasses.replace(EXPERTS, num_shared_experts=1),
}


def dimension_numbers(specs):
    """What optax has to be told: rows and columns of each matrix, and None for what has none."""

    def of(spec):
        if not spec.columns:
            return None
        cut = len(spec.shape) - spec.columns
        return MuonDimensionNumbers(
            tuple(range(spec.lead, cut)), tuple(range(cut, len(spec.shape)))
        )

    return map_specs(of, specs)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        slow({"muon_nesterov": False, "muon_scale": "width", "muon_steps": 3}),
        slow({"muon_scale": "width", "weight_decay": 0.0}),
    ],
    ids=["rms", "plain", "width"],
)
def test_one_device_computes_the_updates_of_optax(fields):
    cfg = replace(TINY, **MODEL, **{f"optimizer.{k}": v for k, v in fields.items()})
    o, specs = cfg.optimizer, param_specs(cfg.model)
    ours = make_optimizer(o, cfg.train.num_steps, specs)
    rate = optax.cosine_decay_schedule(o.learning_rate, cfg.train.num_steps, o.min_lr_ratio)
    theirs = optax.contrib.muon(
        rate,
        ns_steps=o.muon_steps,
        beta=o.muon_momentum,
        eps=o.eps,
        nesterov=o.muon_nesterov,
        weight_decay=o.weight_decay,
        weight_decay_mask=decay_mask(specs),
        muon_weight_dimension_numbers=lambda _: dimension_numbers(specs),
        consistent_rms=0.2 if o.muon_scale == "rms" else None,
    )
    params = gradients(abstract(specs), 100)
    states, rules = [rule.init(params) for rule in (ours, theirs)], (ours, theirs)
    matrices = {name for name, spec in flat(specs).items() if spec.columns}
    assert matrices == {f"layers/{n}" for n in "wq wk wv wo w_gate w_up w_down".split()} | {
        f"layers/w_shared_{n}" for n in ("gate", "up", "down")
    }

    @jax.jit
    def updates(grads, states, params):
        return [rule.update(grads, s, params) for rule, s in zip(rules, states, strict=True)]

    for step in range(STEPS):
        (found, one), (wanted, other) = updates(gradients(params, step), states, params)
        states = [one, other]
        found, wanted = flat(found), flat(wanted)
        for name in matrices:
            error = np.abs(found[name] - wanted[name]).max() / np.abs(wanted[name]).max()
            assert error < 1e-5, name


def test_other_parameters_are_updated_by_adamw():
    cfg = replace(TINY, **MODEL)
    specs = param_specs(cfg.model)
    rules = [
        make_optimizer(dataclasses.replace(cfg.optimizer, name=name), 10, specs)
        for name in ("muon", "adamw")
    ]
    params, grads = (gradients(abstract(specs), i) for i in range(2))
    step = jax.jit(lambda: [rule.update(grads, rule.init(params), params)[0] for rule in rules])
    found, wanted = map(flat, step())
    same = {n for n in found if np.array_equal(found[n], wanted[n])}
    assert same == {name for name, spec in flat(specs).items() if not spec.columns}


def test_matrices_may_have_a_learning_rate_of_their_own():
    """`muon_lr_ratio` times that of all else, weight decay included."""
    specs = param_specs(TINY.model)
    cfg = replace(TINY, **MUON, **{"optimizer.weight_decay": 0.1}).optimizer
    slower = dataclasses.replace(cfg, muon_lr_ratio=0.25)
    params, grads = (gradients(abstract(specs), i) for i in range(2))
    rules = [make_optimizer(one, 10, specs) for one in (cfg, slower)]
    step = jax.jit(lambda: [rule.update(grads, rule.init(params), params)[0] for rule in rules])
    usual, found = map(flat, step())
    for name, spec in flat(specs).items():
        ratio = 0.25 if spec.columns else 1.0
        np.testing.assert_allclose(found[name], ratio * usual[name], rtol=1e-6, err_msg=name)


def test_singular_values_become_about_1():
    """In bfloat16 too, though its rounding moves them by some hundredths."""
    wide = np.random.default_rng(0).normal(size=(2, 24, 40)).astype(np.float32)
    exact = orthogonalize(jnp.asarray(wide), 5, 1e-8)
    tall = orthogonalize(jnp.asarray(wide.mT), 5, 1e-8)
    np.testing.assert_allclose(tall.mT, exact, atol=1e-6)
    rounded = orthogonalize(jnp.asarray(wide, jnp.bfloat16), 5, 1e-8)
    assert rounded.dtype == jnp.bfloat16
    for found in (exact, rounded.astype(jnp.float32)):
        values = np.linalg.svd(np.asarray(found), compute_uv=False)
        assert values.min() > 0.65 and values.max() < 1.25
    assert 1e-3 < jnp.abs(rounded - exact).mean() / jnp.abs(exact).mean() < 0.1
    np.testing.assert_array_equal(orthogonalize(jnp.zeros((1, 3, 5)), 5, 1e-8), 0)


def test_sizes_of_updates():
    """An orthogonal matrix [m, n] has an RMS of 1 / sqrt(max(m, n))."""
    rms, width = (OptimizerConfig(muon_scale=s) for s in ("rms", "width"))
    up, down = (
        ParamSpec(shape=shape, axes=("embed", "mlp"), columns=1) for shape in ((64, 256), (256, 64))
    )
    assert scale(up, rms) == scale(down, rms) == pytest.approx(0.2 * 16)
    assert scale(up, width) == 2 and scale(down, width) == 1


def on_mesh(cfg: Config, item: str, devices) -> tuple:
    parallel = parse_meshes([item], cfg.parallel)[item]
    n = math.prod(axis_sizes(parallel))
    return resolve(replace(cfg, parallel=parallel), n), make_mesh(parallel, devices[:n])


@functools.cache
def one_device(cfg: Config, device):
    return weights_after(*on_mesh(cfg, "data=1", [device]), STEPS)


LATENT = LatentAttention(
    num_heads=4,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
    kv_lora_rank=8,
    q_lora_rank=12,
)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("replica=2,data=2,expert=2,tensor=2", {}),
        slow("data=4,tensor=2", {}),
        slow("expert=2,tensor=2,expert_tensor=1", {}),
        slow("pipeline=2,data=2,sequence=2,num_microbatches=2,zero=1", {}),
        slow("pipeline=2,virtual_stages=2,num_microbatches=2,data=2", {"model.num_layers": 4}),
        slow("data=2,sequence=2,tensor=2", {"model.layers.mixer": LATENT}),
        slow("data=2,tensor=2", {"optimizer.first_moment_dtype": "bfloat16"}),
        slow("data=8", {"model.mtp_depth": 1}),
    ],
)
def test_a_mesh_computes_the_updates_of_one_device(mesh, fields, devices):
    cfg = replace(TINY, **(MODEL | fields))
    found = weights_after(*on_mesh(cfg, mesh, devices), STEPS)
    wanted = one_device(cfg, devices[0])
    errors = distances.update_errors(found[-1], wanted[-1], wanted[0])
    assert distances.worst(errors)[0] < 2e-6


def test_matrices_have_one_moment(devices):
    cfg, mesh = on_mesh(replace(TINY, **MODEL), "data=1", devices)
    specs = param_specs(cfg.model)
    matrices = count([s for s in flat(specs).values() if s.columns])
    state = init_state(cfg, mesh)
    counters = 4 * sum(leaf.ndim == 0 for leaf in jax.tree.leaves(state))
    wanted = 8 * matrices + 12 * (count(specs) - matrices) + counters
    assert bytes_per_device(state) == wanted
    dense = {"model.layers.feed_forward": GLU, "model.layers.mixer.bias": False}
    adapters = replace(cfg, **dense, **{"lora.rank": 2})
    moments = jax.tree.leaves(abstract_state(adapters).opt_state)
    trained = jax.tree.leaves(abstract(trainable_specs(adapters)))
    assert sum(m.size for m in moments if m.ndim) == sum(a.size for a in trained)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer.offload": True}, r"'muon': is not supported with optimizer\.offload"),
        ({"optimizer.muon_momentum": 1.0}, r"optimizer\.muon_momentum"),
        ({"optimizer.muon_steps": 0}, r"optimizer\.muon_steps"),
        (
            {"optimizer.first_moment_dtype": "bfloat16", "optimizer.muon_momentum": 0.9999},
            r"needs optimizer\.muon_momentum <= 0\.999",
        ),
    ],
)
def test_what_cannot_be(fields, said):
    check(replace(TINY, **MUON))
    with pytest.raises(ConfigError, match=said):
        check(replace(TINY, **MUON, **fields))


class Halves(UpdateRule):
    """The upper half of each matrix takes the mean of its rows."""

    needs = "matrices"

    def __call__(self, cfg, rate, mask, matrices):
        def fn(x):
            upper = jnp.arange(x.shape[1])[:, None] < x.shape[1] // 2
            return jnp.where(upper, x.mean(axis=1, keepdims=True), x)

        chosen = optax.stateless(lambda grads, _: matrices.map(fn, grads))
        return optax.chain(chosen, optax.scale_by_learning_rate(rate))


def test_a_rule_of_a_user_may_need_matrices(devices):
    cfg = replace(TINY, **{"optimizer.name": Halves()})
    found = weights_after(*on_mesh(cfg, "data=2,tensor=2", devices), 2)
    wanted = weights_after(*on_mesh(cfg, "data=1", devices), 2)
    errors = distances.update_errors(found[-1], wanted[-1], wanted[0])
    assert distances.worst(errors)[0] < 1e-6
    with pytest.raises(ConfigError, match=r"is not supported with optimizer\.offload"):
        check(replace(cfg, **{"optimizer.offload": True}))
