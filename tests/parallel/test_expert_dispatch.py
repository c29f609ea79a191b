"""Dispatch over an expert axis: where rows go, and what a layer sends. See also tests/meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import ComputeConfig, Glu, ParallelConfig
from jaxpar.model.moe.experts import ExpertWeights
from jaxpar.model.moe.products import products_of
from jaxpar.monitoring.hlo import collective_bytes
from jaxpar.parallel.expert.dispatch import plan_rows
from jaxpar.parallel.expert.rows import capacity
from jaxpar.sharding.mesh import make_mesh
from tests.expert_sums import expert_sums
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile")

#: Devices, tokens of each, experts per token, experts, widths, rows of a tile.
n, N, k, E, D, F, TILE = 4, 12, 2, 8, 16, 8, 4

#: The largest queue has every token twice: no further round.
ENOUGH = float(n)


def on_axis(fn, devices, *arrays):
    """Lower a function of each device's part of arrays along EXPERT."""
    mesh = make_mesh(ParallelConfig(data=1, expert=n), devices[:n])
    every = P(mesh.axis_names)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=every, out_specs=every)
    return jax.jit(mapped).lower(*arrays)


def choices(first: float) -> np.ndarray:
    """Return experts, int32 [n N, k], of which the first two have a share of `first`."""
    share = np.append([first / 2] * 2, [(1 - first) / (E - 2)] * (E - 2))
    rng = np.random.default_rng(0)
    drawn = [rng.choice(E, k, replace=False, p=share) for _ in range(n * N)]
    return np.array(drawn, np.int32)


@pytest.mark.parametrize("by", ["rows", slow("tokens")])
@pytest.mark.parametrize(
    ("first", "slack", "rounds"), [(0.25, 0.3, 5), slow(0.25, ENOUGH, 1), slow(0.999, 1.1, 4)]
)
def test_every_pair_has_one_row_in_the_order_of_the_batch(by, first, slack, rounds, devices):
    chosen = choices(first)
    number = np.arange(1, n * N * k + 1, dtype=np.float32).reshape(n * N, k)

    def rows_seen(chosen, number):
        plan = plan_rows(chosen, E, TILE, slack, by)
        pairs, tokens = plan.pairs_out(number), plan.out(number[:, :1])

        def of_round(plan):
            pair = plan.by_row(pairs).astype(jnp.int32) - 1
            expert, is_row = jnp.repeat(plan.tiles.expert, TILE), pair >= 0
            seen = jnp.zeros((E // n, number.size * n), jnp.int32)
            seen = seen.at[expert, pair].add(is_row, mode="drop", wrap_negative_indices=False)
            same = is_row[1:] & (expert[1:] == expert[:-1])
            late = jnp.sum(same & (pair[1:] <= pair[:-1]))
            other = plan.permuted(tokens)[:, 0].astype(jnp.int32) - 1 != pair // k * k
            home = plan.added(plan.permuted(tokens)), plan.by_pair(pair.astype(jnp.float32) + 1)
            return seen, late, jnp.sum(is_row & other), home

        *counts, (tokens, by_pair) = plan.in_rounds(of_round, of_round(plan))
        to_senders = jax.vjp(plan.pairs_out, number)[1]
        home = plan.home(tokens), *to_senders(plan.gradient_of_sent(by_pair, pairs))
        return jax.tree.map(lambda a: a[None], (counts, plan.further_rounds, home))

    compiled = on_axis(rows_seen, devices, chosen, number).compile()
    (seen, late, other), further, (tokens, pairs) = jax.device_get(compiled(chosen, number))
    wanted = chosen.reshape(-1) == np.arange(E)[:, None]
    np.testing.assert_array_equal(seen.reshape(E, -1), wanted)
    assert not late.any() and not other.any()
    np.testing.assert_array_equal(tokens.reshape(-1), k * number[:, 0])
    np.testing.assert_array_equal(pairs.reshape(-1, k), number)
    if by == "rows":
        np.testing.assert_array_equal(further + 1, [rounds] * n)
    else:
        assert (further.max() > 0) == (rounds > 1)


def layer(by, slack, devices, *, keeps=True):
    """Lower one layer's experts, forward and backward, float32."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    w = ExpertWeights(draw(E, D, F), draw(E, D, F), draw(E, F, D))
    how = products_of(Glu(F), ComputeConfig(), 0)

    def both(chosen, x, weights, w, d_out):
        plan = plan_rows(chosen, E, TILE, slack, by)
        out, pullback = jax.vjp(lambda *a: expert_sums(how, *a, plan, keeps=keeps), x, weights, w)
        return out, pullback(d_out)

    arrays = choices(0.25), draw(n * N, D), draw(n * N, k), w, draw(n * N, D)
    return on_axis(both, devices, *arrays)


def sent(lowered) -> dict:
    return collective_bytes(lowered.compile().as_text()).kinds


def test_what_a_layer_sends_by_rows(devices):
    """Tokens and weights out, results home; their gradients the other way."""
    found = sent(layer("rows", ENOUGH, devices))
    C, others = capacity(N, k, E // n, n, ENOUGH), n - 1
    assert found == {
        "all-gather": {"count": 1, "bytes": others * E * 4},
        "all-to-all": {"count": 6, "bytes": others * C * (4 * D + 2) * 4},
    }


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_layer_sends_by_tokens(keeps, devices):
    """Tokens and weights out, sums home; their gradients the other way; and one plan. A backward
    that has not kept the tokens sends them again."""
    found = sent(layer("tokens", ENOUGH, devices, keeps=keeps))
    others, plan, again = n - 1, N * k + E, not keeps
    numbers = N * ((4 + again) * D + 2 * k) + plan
    assert found == {"permute": {"count": (7 + again) * others, "bytes": others * numbers * 4}}


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_no_round_asks_the_host(by, devices):
    text = layer(by, 0.3, devices).as_text()
    assert "stablehlo.while" in text and "stablehlo.case" not in text
    assert "callback" not in text and "outfeed" not in text
