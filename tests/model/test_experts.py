"""The parts of a mixture of experts: the router's choice, the plan of rows, and the backward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import ClampedSwiglu, ComputeConfig, Experts, Glu, Layer, Model, Router, replace
from jaxpar.config.command_line import load_config
from jaxpar.kernels.glu import ClampedSwiGLU, GeGLU, SwiGLU
from jaxpar.model import flops
from jaxpar.model.moe import experts, router
from jaxpar.model.moe.products import InComputeDtype
from tests.expert_sums import expert_sums
from tests.slow import slow
from tests.tiny import ATTENTION, EXPERTS


def test_a_token_takes_its_likeliest_experts():
    w, h = {"router": jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))}, jnp.ones((1, 1, 1))
    found = router.route(h, w, EXPERTS)
    np.testing.assert_array_equal(found.experts[0, 0], [1, 3])
    np.testing.assert_allclose(found.weights[0, 0], [2 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_array_equal(found.counts[0], [0, 1, 0, 1])
    as_is = dataclasses.replace(EXPERTS, router=Router(normalize=False))
    np.testing.assert_allclose(router.route(h, w, as_is).weights[0, 0], [0.5, 0.25], rtol=1e-6)


def test_experts_not_taken_do_not_count_as_flops():
    mixtral = replace(load_config("mixtral_8x7b"), **{"model.layers.mixer.window": None}).model
    assert flops.num_params(mixtral) == pytest.approx(46.7e9, rel=1e-3)  # Mixtral 8x7B's
    assert flops.num_matmul_params(mixtral) == pytest.approx(12.9e9 - 32000 * 4096, rel=5e-3)


def test_biases_of_experts_not_taken_do_not_count_either():
    def counted(expert: Glu) -> int:
        routed = Experts(expert=expert, num_experts=8, experts_per_token=3)
        layers = [Layer("layers", ATTENTION, routed)] * 2
        return flops.num_matmul_params(Model(d_model=16, vocab_size=48, layers=layers))

    of_taken = 2 * (3 * 2 * 24 + 8 * 16 - 5 * 16)
    assert counted(Glu(24, bias=True)) - counted(Glu(24)) == of_taken


def choices(num_experts: int, groups: int, groups_per_token: int, scores) -> list:
    of_router = Router(groups=groups, groups_per_token=groups_per_token)
    of = dataclasses.replace(EXPERTS, num_experts=num_experts, router=of_router)
    return np.sort(router.choose(jnp.asarray(scores, jnp.float32), of)).tolist()


def test_a_bias_enters_the_choice_alone():
    of_router = Router(score="sigmoid", balancing_bias=True, scale=2.5)
    logits, bias = jnp.array([0.0, 1.0, -1.0, 2.0]), jnp.array([0.0, 0.0, 5.0, 0.0])
    w = {"router": logits[None], "router_bias": bias}
    of = dataclasses.replace(EXPERTS, router=of_router)
    found = router.route(jnp.ones((1, 1, 1)), w, of)
    np.testing.assert_array_equal(found.experts[0, 0], [2, 3])
    scores = 1 / (1 + np.exp(-np.asarray(logits)[[2, 3]]))
    np.testing.assert_allclose(found.weights[0, 0], 2.5 * scores / scores.sum(), rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(found.probabilities), 1, rtol=1e-6)


def test_groups_are_chosen_by_their_two_best():
    assert choices(6, 2, 1, [0.9, 0.0, 0.0, 0.5, 0.6, 0.1]) == [3, 4]  # 1.1 against 0.9
    assert choices(6, 3, 2, [0.9, 0.0, 0.2, 0.3, 0.4, 0.4]) == [0, 4]
    assert choices(4, 4, 2, [0.1, 0.4, 0.3, 0.2]) == [1, 2]


plan_rows = jax.jit(experts.plan_rows, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, d_out, *args):
    """What a function gives, and the gradients of its arguments: one program for all of it."""
    out, pullback = jax.vjp(function, *args)
    return jax.tree.leaves((out, pullback(d_out)))


@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 8], [2, 2, 2, 2]], ids=str)
def test_rows_are_sorted_by_expert_then_by_token(counts):
    rng = np.random.default_rng(0)
    chosen = rng.permutation(np.repeat(np.arange(4), counts)).reshape(-1, 2).astype(np.int32)
    plan = plan_rows(jnp.asarray(chosen), 4, 4)
    rows, token = np.asarray(plan.rows), np.asarray(plan.token)
    assert len(np.unique(rows)) == rows.size, "every pair has a row of its own"
    np.testing.assert_array_equal(token[rows], np.arange(len(rows))[:, None].repeat(2, 1))
    np.testing.assert_array_equal(np.asarray(plan.tiles.expert)[rows // 4], chosen)
    in_order = np.argsort(rows.ravel())
    np.testing.assert_array_equal(in_order, np.argsort(chosen.ravel(), kind="stable"))


CLAMPED = ClampedSwiGLU(limit=1.0, alpha=1.702)


@pytest.mark.parametrize(
    ("glu", "biased"),
    [slow(SwiGLU(), False), slow(GeGLU(), True), (CLAMPED, True)],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_written_out_backward_is_the_gradient(glu, biased):
    """Against autodiff of every expert for every token, with one expert that has no token."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, weights, w = draw(7, 4), draw(7, 2), (draw(3, 4, 6), draw(3, 4, 6), draw(3, 6, 4))
    biases = (draw(3, 6), draw(3, 6)) if biased else ()
    chosen = jnp.asarray([[0, 2]] * 7, jnp.int32)
    plan = plan_rows(chosen, 3, 4)

    def ours(expert_dim, x, weights, w, biases):
        if expert_dim == 1:
            w = tuple(jnp.moveaxis(a, dim, 0) for a, dim in zip(w, (1, 1, 2), strict=True))
        of_experts = experts.ExpertWeights(*w, *biases)
        how = InComputeDtype(expert_dim, glu)
        return expert_sums(how, x, weights, of_experts, plan)

    def plain(x, weights, w, biases):
        b = biases or (0.0, 0.0)
        gate, up = (jnp.einsum("nd,edf->nef", x, w[i]) + b[i] for i in range(2))
        out = jnp.einsum("nef,efd->ned", glu.hidden(gate, up), w[2])
        return jnp.einsum("nkd,nk->nd", out[:, [0, 2]], weights)

    given = draw(7, 4), x, weights, w, biases
    wanted = with_gradients(plain, *given)
    for expert_dim in (0, 1):
        found = with_gradients(functools.partial(ours, expert_dim), *given)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("activation", "biased"),
    [
        slow("silu", False),
        slow("silu", True),
        slow("gelu", False),
        (ClampedSwiglu(limit=30.0), True),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_gradients_in_float8_are_near_the_exact_ones(activation, biased):
    """A clamp is tested far from its limit, at which rounding decides on gradients."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, weights, w = draw(64, 32), draw(64, 2), (draw(3, 32, 16), draw(3, 32, 16), draw(3, 16, 32))
    biases = (draw(3, 16), draw(3, 16)) if biased else ()
    if isinstance(activation, ClampedSwiglu):
        biases = tuple(b.at[:, ::8].set(jnp.copysign(90, b[:, ::8])) for b in biases)
    chosen = jnp.asarray([[0, 2], [1, 2]] * 32, jnp.int32)
    plan, d_out = plan_rows(chosen, 3, 4), draw(64, 32)

    def run(dtype, expert_dim):
        compute = ComputeConfig(matmul_dtype=dtype)
        how = experts.products_of(Glu(16, activation), compute, expert_dim)

        def layer(x, weights, w, biases):
            if expert_dim == 1:
                w = tuple(jnp.moveaxis(a, dim, 0) for a, dim in zip(w, (1, 1, 2), strict=True))
            of_experts = experts.ExpertWeights(*how.matrices(w), *biases)
            return expert_sums(how, x, weights, of_experts, plan)

        return [np.asarray(a) for a in with_gradients(layer, d_out, x, weights, w, biases)]

    exact = run("compute", 0)
    for found in (run("float8", 0), run("float8", 1)):
        for a, b in zip(found, exact, strict=True):
            assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.15
