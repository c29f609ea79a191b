"""The parts of a mixture of experts: the router's choice, the plan of rows, and the backward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import ModelConfig, replace
from jaxpar.config.command_line import load_config
from jaxpar.model import flops
from jaxpar.model.feed_forward import gated
from jaxpar.model.moe import experts, router


def test_a_token_takes_its_likeliest_experts():
    m = ModelConfig(num_experts=4, experts_per_token=2)
    w, h = {"router": jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))}, jnp.ones((1, 1, 1))
    found = router.route(h, w, m)
    np.testing.assert_array_equal(found.experts[0, 0], [1, 3])
    np.testing.assert_allclose(found.weights[0, 0], [2 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_array_equal(found.counts[0], [0, 1, 0, 1])
    as_is = ModelConfig(num_experts=4, experts_per_token=2, normalize_experts=False)
    np.testing.assert_allclose(router.route(h, w, as_is).weights[0, 0], [0.5, 0.25], rtol=1e-6)


def test_experts_not_taken_do_not_count_as_flops():
    mixtral = replace(
        load_config("llama3_8b"),
        **{"model.num_experts": 8, "model.vocab_size": 32000, "model.sliding_window": None},
    ).model
    assert flops.num_params(mixtral) == pytest.approx(46.7e9, rel=1e-3)  # Mixtral 8x7B's
    assert flops.num_matmul_params(mixtral) == pytest.approx(12.9e9 - 32000 * 4096, rel=5e-3)


def choices(m: ModelConfig, scores) -> list:
    return np.sort(router.choose(jnp.asarray(scores, jnp.float32), m)).tolist()


def test_a_bias_enters_the_choice_alone():
    m = ModelConfig(num_experts=4, router_score="sigmoid", router_bias=True, router_scale=2.5)
    logits, bias = jnp.array([0.0, 1.0, -1.0, 2.0]), jnp.array([0.0, 0.0, 5.0, 0.0])
    w = {"router": logits[None], "router_bias": bias}
    found = router.route(jnp.ones((1, 1, 1)), w, m)
    np.testing.assert_array_equal(found.experts[0, 0], [2, 3])
    scores = 1 / (1 + np.exp(-np.asarray(logits)[[2, 3]]))
    np.testing.assert_allclose(found.weights[0, 0], 2.5 * scores / scores.sum(), rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(found.probabilities), 1, rtol=1e-6)


def test_groups_are_chosen_by_their_two_best():
    m = ModelConfig(num_experts=6, router_groups=2, router_groups_per_token=1)
    assert choices(m, [0.9, 0.0, 0.0, 0.5, 0.6, 0.1]) == [3, 4]  # 1.1 against 0.9
    two = ModelConfig(num_experts=6, router_groups=3, router_groups_per_token=2)
    assert choices(two, [0.9, 0.0, 0.2, 0.3, 0.4, 0.4]) == [0, 4]
    single = ModelConfig(num_experts=4, router_groups=4, router_groups_per_token=2)
    assert choices(single, [0.1, 0.4, 0.3, 0.2]) == [1, 2]


@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 8], [2, 2, 2, 2]], ids=str)
def test_rows_are_sorted_by_expert_then_by_token(counts):
    rng = np.random.default_rng(0)
    chosen = rng.permutation(np.repeat(np.arange(4), counts)).reshape(-1, 2).astype(np.int32)
    plan = experts.plan_rows(jnp.asarray(chosen), 4, 4)
    rows, token = np.asarray(plan.rows), np.asarray(plan.token)
    assert len(np.unique(rows)) == rows.size, "every pair has a row of its own"
    np.testing.assert_array_equal(token[rows], np.arange(len(rows))[:, None].repeat(2, 1))
    np.testing.assert_array_equal(np.asarray(plan.tiles.expert)[rows // 4], chosen)
    in_order = np.argsort(rows.ravel())
    np.testing.assert_array_equal(in_order, np.argsort(chosen.ravel(), kind="stable"))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_written_out_backward_is_the_gradient(activation):
    """Against autodiff of every expert for every token, with one expert that has no token."""
    m = ModelConfig(num_experts=3, experts_per_token=2, activation=activation)
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, weights, w = draw(7, 4), draw(7, 2), (draw(3, 4, 6), draw(3, 4, 6), draw(3, 6, 4))
    chosen = jnp.asarray([[0, 2]] * 7, jnp.int32)
    plan = experts.plan_rows(chosen, 3, 4)

    def ours(expert_dim, x, weights, w):
        if expert_dim == 1:
            w = tuple(jnp.moveaxis(a, dim, 0) for a, dim in zip(w, (1, 1, 2), strict=True))
        return experts.of_rows(experts.products_of(m, expert_dim), x, weights, w, plan)

    def plain(x, weights, w):
        gate, up = (jnp.einsum("nd,edf->nef", x, a) for a in w[:2])
        out = jnp.einsum("nef,efd->ned", gated(gate, up, m), w[2])
        return jnp.einsum("nkd,nk->nd", out[:, [0, 2]], weights)

    wanted, pullback = jax.vjp(plain, x, weights, w)
    for expert_dim in (0, 1):
        found, own = jax.vjp(functools.partial(ours, expert_dim), x, weights, w)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        d = draw(7, 4)
        for a, b in zip(jax.tree.leaves(own(d)), jax.tree.leaves(pullback(d)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gradients_in_float8_are_near_the_exact_ones(activation):
    m = ModelConfig(num_experts=3, experts_per_token=2, activation=activation)
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, weights, w = draw(64, 32), draw(64, 2), (draw(3, 32, 16), draw(3, 32, 16), draw(3, 16, 32))
    chosen = jnp.asarray([[0, 2], [1, 2]] * 32, jnp.int32)
    plan, d_out = experts.plan_rows(chosen, 3, 4), draw(64, 32)

    def run(dtype, expert_dim):
        how = experts.products_of(dataclasses.replace(m, matmul_dtype=dtype), expert_dim)

        def layer(x, weights, w):
            if expert_dim == 1:
                w = tuple(jnp.moveaxis(a, dim, 0) for a, dim in zip(w, (1, 1, 2), strict=True))
            return experts.of_rows(how, x, weights, how.matrices(w), plan)

        out, pullback = jax.vjp(layer, x, weights, w)
        return jax.tree.leaves((out, pullback(d_out)))

    exact = run("compute", 0)
    for found in (run("float8", 0), run("float8", 1)):
        for a, b in zip(found, exact, strict=True):
            assert 1e-3 < jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 0.15
