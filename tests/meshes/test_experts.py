"""Mixtures of experts: the same loss, gradients and steps on every mesh as the plain model's."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, ModelConfig, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.validate import check, resolve
from jaxpar.model import flops
from jaxpar.model.feed_forward import gated
from jaxpar.model.moe import experts, router
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.verification import distances, small_config, traces
from jaxpar.verification.meshes import parse_meshes, resolve_meshes
from tests import weights
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"model.d_ff": 12, "model.num_experts": 4})

#: Every option of a router, as DeepSeek-V3 has them, with losses that count.
DEEPSEEK = replace(
    BASE,
    **{
        "model.num_experts": 8,
        "model.num_shared_experts": 2,
        "model.router_score": "sigmoid",
        "model.router_bias": True,
        "model.router_groups": 4,
        "model.router_groups_per_token": 2,
        "model.router_scale": 2.5,
        "train.balance_loss": 0.3,
        "train.router_z_loss": 0.1,
        "train.router_bias_rate": 0.01,
    },
)

OVER_BATCH = replace(BASE, **{"train.balance_loss": 0.3, "train.balance_over": "batch"})

QUICK_MESHES = """
tensor=2
pipeline=2,num_microbatches=2,zero=1
expert=2,sequence=2,layer_loop=unroll
""".split()

SLOW_MESHES = """
data=2
data=2,num_microbatches=2,zero=2
data=2,tensor=2,layer_loop=unroll,row_groups=2
pipeline=2,sequence=2,tensor=2,num_microbatches=2
""".split()


@functools.cache
def reference_of(cfg: Config, steps: int):
    batches = [traces.random_batch(cfg, i) for i in range(max(steps, 1))]
    if not steps:
        return batches, weights.plain_gradients(cfg, batches[0])
    return batches, traces.reference_trace(cfg, batches, steps)


def compare(mesh_item: str, cfg: Config, devices, steps: int = 0) -> distances.Comparison:
    parallel = parse_meshes([mesh_item], cfg.parallel)[mesh_item]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batches, wanted = reference_of(cfg, steps)
    mesh = make_mesh(parallel, devices[:n])
    if steps:
        found = traces.mesh_trace(on_mesh, mesh, batches, steps)
    else:
        found = weights.first_gradients(on_mesh, mesh, batches[0])
    return distances.compare(found, wanted, TOLERANCE)


@pytest.mark.parametrize("mesh", [*QUICK_MESHES, *map(slow, SLOW_MESHES)])
def test_gradients(mesh, devices):
    found = compare(mesh, BASE, devices)
    assert not found.mismatches()


DEEPSEEK_MESHES = """
pipeline=2,data=2,num_microbatches=2
data=2,sequence=2,tensor=2,layer_loop=unroll
""".split()

MORE_DEEPSEEK_MESHES = """
data=1
expert=2,num_microbatches=2
data=2,zero=1
data=2,zero=2,num_microbatches=2
replica=2,tensor=2
data=4,layer_loop=unroll
data=2,tensor=2,layer_loop=unroll,row_groups=2
tensor=2,num_microbatches=4,zero=1,layer_loop=unroll
pipeline=2,data=2,num_microbatches=2,layer_loop=unroll
pipeline=2,replica=2,num_microbatches=4,zero=1,layer_loop=unroll
pipeline=2,tensor=2,num_microbatches=2,schedule=gpipe,layer_loop=unroll
pipeline=2,sequence=2,tensor=2,num_microbatches=2,pipeline_save=inputs
data=2,remat=full
data=2,remat=none,layer_loop=unroll
""".split()


@pytest.mark.parametrize("mesh", [*DEEPSEEK_MESHES, *map(slow, MORE_DEEPSEEK_MESHES)])
def test_gradients_with_every_router_option(mesh, devices):
    assert not compare(mesh, DEEPSEEK, devices).mismatches()


@pytest.mark.parametrize(
    "mesh", ["data=2,sequence=2", slow("pipeline=2,replica=2,tensor=2"), slow("data=4,tensor=2")]
)
def test_gradients_of_balance_over_the_batch(mesh, devices):
    assert not compare(mesh, OVER_BATCH, devices).mismatches()


def test_losses_reach_the_router():
    """The same tests with another weight of a loss would fail."""
    base = replace(DEEPSEEK, **{"model.num_layers": 1})
    batch = traces.random_batch(base)
    found = weights.plain_gradients(base, batch).gradients["layers/router"]
    for path in ("train.balance_loss", "train.router_z_loss"):
        without = replace(base, **{path: 0.0})
        other = weights.plain_gradients(without, batch).gradients["layers/router"]
        assert np.abs(found - other).max() > 1e-2 * np.abs(found).max()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "pipeline=2,data=2,num_microbatches=2"])
def test_steps_with_every_router_option(mesh, devices):
    found = compare(mesh, DEEPSEEK, devices, 5)
    assert found.update is not None and not found.mismatches()


@pytest.mark.slow
def test_gradients_without_normalization(devices):
    other = {"model.normalize_experts": False, "model.experts_per_token": 3, "model.num_layers": 1}
    found = compare("tensor=2", replace(BASE, **other), devices)
    assert not found.mismatches()


@pytest.mark.slow
def test_three_steps(devices):
    found = compare("pipeline=2,tensor=2,num_microbatches=2,zero=1", BASE, devices, 3)
    assert found.update is not None and not found.mismatches()


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


def test_shrinking_keeps_the_experts():
    small = small_config.shrink(replace(BASE, **{"model.num_experts": 128}), [BASE.parallel])
    assert (small.model.num_experts, small.model.experts_per_token) == (8, 2)
    groups = {"model.router_groups": 8, "model.router_groups_per_token": 4}
    of_256 = {"model.num_experts": 256, "model.experts_per_token": 8} | groups
    small = small_config.shrink(replace(BASE, **of_256), [BASE.parallel])
    assert (small.model.num_experts, small.model.experts_per_token) == (16, 4)
    check(small)


def test_verify_refuses_a_loss_that_depends_on_microbatches():
    name = "data=2,num_microbatches=2"
    meshes = parse_meshes([name], OVER_BATCH.parallel)
    with pytest.raises(ConfigError, match=r"has 2 microbatches.*--train.balance-over sequence"):
        resolve_meshes(OVER_BATCH, meshes, 8, given=True)
    assert resolve_meshes(DEEPSEEK, meshes, 8, given=True)


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
        return experts.of_rows(experts.Products(m, expert_dim), x, weights, w, plan)

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


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.num_experts": -1}, r"model\.num_experts = -1: must not be negative"),
        ({"model.experts_per_token": 5}, r"= 5: must be at most model\.num_experts = 4.*use --mo"),
        ({"model.experts_per_token": 0}, r"experts_per_token = 0: must be at least 1"),
        (
            {"model.experts_per_token": 1},
            r"= 1: leaves the router without a gradient.*normalize-experts F",
        ),
        (
            {"model.experts_per_token": 1, "model.normalize_experts": False}
            | {"model.post_norms": True},
            r"= 1: leaves the router without a gradient: the norm after.*post-norms False",
        ),
        ({"model.router_groups": 3}, r"router_groups = 3: must divide model\.num_experts = 4.*s 2"),
        ({"model.router_groups": 0}, "router_groups = 0: must be at least 1"),
        (
            {"model.router_groups_per_token": 2},
            "per_token = 2: must be at most model.router_groups",
        ),
        (
            {"model.router_groups": 4},
            "groups_per_token = 1: leaves 1 experts of which to choose 2.*per-token 2, or",
        ),
        ({"model.router_scale": 0.0}, "router_scale = 0.0: must be above 0"),
        ({"model.router_scale": -1.0}, "router_scale = -1.0: must be above 0"),
        ({"model.num_shared_experts": -1}, "shared_experts = -1: must not be negative"),
        ({"model.router_score": "relu"}, "router_score = 'relu'"),
        ({"train.balance_loss": -0.1}, "balance_loss = -0.1: must not be negative"),
        ({"train.balance_loss": float("inf")}, "balance_loss = inf: must be finite"),
        ({"train.router_z_loss": float("nan")}, "router_z_loss = nan: must be finite"),
        ({"train.balance_over": "batch"}, "balance_over = 'batch': needs a balance loss"),
        ({"train.router_bias_rate": 0.1}, "bias_rate = 0.1: needs model.router_bias, which is F"),
        ({"model.router_bias": True, "train.router_bias_rate": 0.0}, "rate = 0.0: must be above 0"),
        (
            {"train.balance_loss": 0.1, "lora.rank": 2, "lora.targets": "q_proj"},
            "balance_loss = 0.1: has no effect on a frozen router",
        ),
        ({"model.num_experts": 0, "train.balance_loss": 0.1}, "= 0.1: needs experts"),
        ({"model.num_experts": 0, "model.router_bias": True}, "= True: needs experts"),
        ({"model.num_experts": 0, "model.router_score": "sigmoid"}, "'sigmoid': needs experts"),
        ({"model.num_experts": 0, "model.num_shared_experts": 1}, "= 1: needs experts"),
        ({"model.num_experts": 0, "model.experts_per_token": 3}, "= 3: needs experts"),
        ({"model.num_experts": 0, "model.normalize_experts": False}, "= False: needs experts"),
        ({"model.mlp_bias": True}, r"model\.mlp_bias = True: needs a dense feed-forward layer"),
        ({"model.matmul_dtype": "float8"}, r"matmul_dtype = 'float8': does not support experts"),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **values))
