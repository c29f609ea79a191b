"""The learning rate at its corners, what decays and what does not, and clipping."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import Attention, Glu, Layer, Model, OptimizerConfig, QkNorm, Router
from jaxpar.model.parameters import param_specs
from jaxpar.optimizer import schedules
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.optimizer.schedules import learning_rate
from jaxpar.parallel.gradients import clip
from jaxpar.sharding.params import abstract, decay_mask, flat
from tests.tiny import EXPERTS

PEAK, RATIO, WARMUP, STEPS = 3e-3, 0.1, 10, 110
FLOOR = PEAK * RATIO

_HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
_ATTENTION = Attention(**_HEADS, qk_norm=QkNorm(), bias=True, out_bias=True)
_LAYER = Layer("layers", _ATTENTION, Glu(12, bias=True))
MODEL = Model(d_model=8, vocab_size=16, layers=[_LAYER] * 2)


def rates(schedule: str, warmup: int = WARMUP, steps: int = STEPS) -> np.ndarray:
    """Learning rate of each step, and of ten that never come."""
    cfg = OptimizerConfig(
        learning_rate=PEAK, schedule=schedule, warmup_steps=warmup, min_lr_ratio=RATIO
    )
    return np.asarray(jax.vmap(learning_rate(cfg, steps))(jnp.arange(steps + 10)))


# ------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_rises_evenly_to_the_peak_and_wastes_no_step(schedule):
    rate = rates(schedule)
    np.testing.assert_allclose(rate[:WARMUP], PEAK * np.arange(1, WARMUP + 1) / WARMUP, rtol=1e-6)
    np.testing.assert_allclose(rate[WARMUP], PEAK, rtol=1e-6)
    assert rate.max() <= PEAK * (1 + 1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_little_or_no_warm_up_starts_at_the_peak(schedule, warmup):
    np.testing.assert_allclose(rates(schedule, warmup)[: warmup + 1], PEAK, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
def test_the_rate_never_rises_again_and_ends_at_its_floor(schedule, warmup):
    rate = rates(schedule, warmup)
    after = rate[warmup:STEPS]
    assert np.all(np.diff(after) <= PEAK * 1e-6)
    np.testing.assert_allclose(rate[STEPS:], FLOOR, rtol=1e-6)
    assert FLOOR < rate[STEPS - 1] < FLOOR + 0.06 * PEAK  # one step of the decay before it


def test_linear_is_half_way_in_the_middle():
    middle = WARMUP + (STEPS - WARMUP) // 2
    np.testing.assert_allclose(rates("linear")[middle], (PEAK + FLOOR) / 2, rtol=1e-6)


def test_cosine_follows_the_cosine():
    t = np.arange(STEPS - WARMUP) / (STEPS - WARMUP)
    wanted = FLOOR + (PEAK - FLOOR) * (1 + np.cos(np.pi * t)) / 2
    np.testing.assert_allclose(rates("cosine")[WARMUP:STEPS], wanted, rtol=1e-5)


def test_wsd_is_stable_and_falls_in_the_last_fifth():
    rate, fall = rates("wsd"), (STEPS - WARMUP) // 5
    np.testing.assert_allclose(rate[WARMUP : STEPS - fall + 1], PEAK, rtol=1e-6)
    line = np.linspace(PEAK, FLOOR, fall + 1)
    np.testing.assert_allclose(rate[STEPS - fall : STEPS + 1], line, rtol=1e-5)


def test_constant_stays():
    np.testing.assert_allclose(rates("constant")[WARMUP:], PEAK, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_shortest_runs_have_a_rate(schedule):
    for steps, warmup in ((1, 0), (2, 1), (3, 2)):
        rate = rates(schedule, warmup, steps)[:steps]
        assert np.all((rate > 0) & (rate <= PEAK * (1 + 1e-6)))


@pytest.mark.parametrize(
    ("steps", "asked", "taken"), [(20, 20, 2), (19, 20, 1), (21, 20, 20), (1, 100, 0), (9, 100, 0)]
)
def test_a_short_run_has_a_short_warm_up_and_says_so(steps, asked, taken):
    cfg = OptimizerConfig(learning_rate=PEAK, warmup_steps=asked)
    assert schedules.warm_up(cfg, steps) == taken
    rate = np.asarray(jax.vmap(learning_rate(cfg, steps))(jnp.arange(steps)))
    np.testing.assert_allclose(rate[max(taken - 1, 0)], PEAK, rtol=1e-6)
    told = f"{taken} steps, not optimizer.warmup_steps = {asked}, in a run of {steps}"
    assert schedules.shortened(cfg, steps) == ("" if taken == asked else told)


def test_a_warm_up_may_be_a_share_of_the_run():
    cfg = OptimizerConfig(learning_rate=PEAK, warmup_steps=7, warmup_fraction=0.1)
    assert [schedules.warm_up(cfg, steps) for steps in (10, 1000, 1)] == [1, 100, 0]
    assert schedules.shortened(cfg, 5) == ""
    wanted = rates("cosine", warmup=STEPS // 10)
    found = jax.vmap(learning_rate(dataclasses.replace(cfg, min_lr_ratio=RATIO), STEPS))
    np.testing.assert_allclose(found(jnp.arange(STEPS + 10)), wanted, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_decay_of_some_steps(schedule):
    """After the warm-up, and then the floor; for wsd at the end of the run."""
    cfg = OptimizerConfig(
        learning_rate=PEAK, schedule=schedule, warmup_steps=WARMUP, decay_steps=10
    )
    cfg = dataclasses.replace(cfg, min_lr_ratio=RATIO)
    rate = np.asarray(jax.vmap(learning_rate(cfg, STEPS))(jnp.arange(STEPS + 1)))
    first = STEPS - 10 if schedule == "wsd" else WARMUP
    np.testing.assert_allclose(rate[WARMUP : first + 1], PEAK, rtol=1e-6)
    assert np.all(np.diff(rate[first : first + 11]) < 0)
    np.testing.assert_allclose(rate[first + 10 :], FLOOR, rtol=1e-6)


def test_a_floor_of_nothing_and_of_the_peak():
    for ratio in (0.0, 1.0):
        cfg = OptimizerConfig(learning_rate=PEAK, warmup_steps=0, min_lr_ratio=ratio)
        np.testing.assert_allclose(learning_rate(cfg, 50)(50), ratio * PEAK, atol=1e-9)


def test_the_log_and_the_step_see_the_same_rate():
    cfg = OptimizerConfig(learning_rate=PEAK, warmup_steps=WARMUP)
    schedule = learning_rate(cfg, STEPS)
    inside = jax.jit(jax.vmap(schedule))(jnp.arange(STEPS))
    np.testing.assert_allclose([float(schedule(i)) for i in range(STEPS)], inside, rtol=1e-6)


# ----------------------------------------------------------------------------- weight decay


def test_matrices_decay_and_norms_and_biases_do_not():
    mask = flat(decay_mask(param_specs(MODEL)))
    matrices = {name for name, decays in mask.items() if decays}
    layers = {f"layers/{name}" for name in "wq wk wv wo w_gate w_up w_down".split()}
    assert matrices == {"embed", "head"} | layers
    exempt = "attn_norm mlp_norm q_norm k_norm bq bk bv bo b_gate b_up b_down".split()
    assert set(mask) - matrices == {"final_norm"} | {f"layers/{name}" for name in exempt}


def test_biases_of_experts_do_not_decay():
    biased = {"expert": Glu(12, bias=True), "router": Router(linear_bias=True)}
    experts = dataclasses.replace(EXPERTS, **biased)
    layers = [Layer("layers", _ATTENTION, experts)] * 2
    mask = flat(decay_mask(param_specs(MODEL.with_layers(layers))))
    assert not any(mask[f"layers/b_{name}"] for name in ("gate", "up", "down", "router"))
    assert mask["layers/w_down"] and mask["layers/router"]


def random_params(specs):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), abstract(specs))


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_without_a_gradient_only_the_matrices_shrink(name):
    specs = param_specs(MODEL)
    cfg = OptimizerConfig(
        name=name, learning_rate=0.5, schedule="constant", warmup_steps=0, weight_decay=0.1
    )

    @jax.jit
    def first_update(params):
        rule = make_optimizer(cfg, 10, specs)
        nothing = jax.tree.map(jnp.zeros_like, params)
        return rule.update(nothing, rule.init(params), params)[0]

    params = random_params(specs)
    updates = first_update(params)
    mask, params = flat(decay_mask(specs)), flat(params)
    for path, update in flat(updates).items():
        wanted = -0.5 * 0.1 * params[path] if mask[path] else jnp.zeros_like(params[path])
        np.testing.assert_allclose(update, wanted, rtol=1e-6, err_msg=path)


def test_adamw_takes_its_textbook_step():
    cfg = OptimizerConfig(
        learning_rate=0.1, schedule="constant", warmup_steps=0, beta1=0.8, beta2=0.9, eps=1e-3
    )
    specs = param_specs(MODEL)
    rule = make_optimizer(cfg, 10, specs)
    params = random_params(specs)
    state, m, v, p = rule.init(params), 0.0, 0.0, np.asarray(params["embed"], np.float64)
    rng, update = np.random.default_rng(0), jax.jit(rule.update)
    for t in range(1, 4):
        g = rng.normal(size=p.shape)
        grads = jax.tree.map(jnp.zeros_like, params) | {"embed": jnp.asarray(g, jnp.float32)}
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        step = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        p = p - 0.1 * (step + cfg.weight_decay * p)
        np.testing.assert_allclose(params["embed"], p, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------- clipping


def norm_of(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


@pytest.mark.parametrize(("limit", "wanted"), [(1.0, 1.0), (4.0, 4.0), (5.0, 5.0), (20.0, 5.0)])
def test_clipping_scales_down_to_the_limit_and_never_up(limit, wanted):
    grads = {"a": jnp.asarray([3.0, 0.0]), "b": {"c": jnp.asarray([[4.0]])}}
    clipped = clip(grads, jnp.float32(5.0), limit)
    np.testing.assert_allclose(norm_of(clipped), wanted, rtol=1e-5)
    np.testing.assert_allclose(clipped["a"][0] / clipped["b"]["c"][0, 0], 0.75, rtol=1e-6)


def test_no_limit_leaves_the_gradients_alone():
    grads = {"a": jnp.asarray([3e9, -1.0])}
    assert clip(grads, jnp.float32(3e9), 0.0) is grads


def test_a_gradient_of_nothing_stays_nothing():
    clipped = clip({"a": jnp.zeros(3)}, jnp.float32(0.0), 1.0)
    np.testing.assert_array_equal(clipped["a"], 0.0)
