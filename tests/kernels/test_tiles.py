"""Which tiles a mask leaves, against the mask spelt out, tile by tile; no kernel runs."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import tiles
from jaxpar.kernels.attention.hopper import mask as pallas_hopper_mask
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.kernels.attention.tiles import LAST
from tests.kernels.cases import Case, mask_of
from tests.slow import slow_but

#: Many rows, each with a mask of its own; in a row with few documents they are long.
ROWS = 24

CASES = [
    Case(),
    Case(window=1),
    Case(window=13),
    Case(documents=ROWS),
    Case(documents=ROWS, window=11),
    Case("permuted"),
    Case("permuted", S=70, documents=5),
    Case("permuted", S=31, documents=9, window=6),
    Case("zigzag", S=192),
    Case("zigzag", S=192, window=50),
    Case("zigzag", S=192, documents=ROWS),
    Case("late", S=50),
    Case("late", S=50, documents=3, window=20),
]

#: Rows of queries, rows of keys.
BLOCKS = [(8, 8), (16, 4), (4, 16), (12, 8)]


def spelt_out(bounds: tiles.Bounds, T: int, S: int) -> np.ndarray:
    """The rule of `tiles.py`, bool [B, T, S], padded."""
    rows = iter([] if bounds.queries is None else np.asarray(bounds.queries).swapaxes(0, 1))
    cols = iter([] if bounds.keys is None else np.asarray(bounds.keys).swapaxes(0, 1))
    place = np.arange(S)[None] if bounds.in_order else next(cols)
    high = np.arange(T)[None] if bounds.in_order else next(rows)
    seen = place[:, None] <= high[:, :, None]
    if bounds.has_low:
        seen = seen & (place[:, None] >= next(rows)[:, :, None])
    if bounds.has_segments:
        seen = seen & (next(cols)[:, None] == next(rows)[:, :, None])
    assert next(rows, None) is None and next(cols, None) is None
    return np.broadcast_to(seen, (ROWS, T, S))


@functools.partial(jax.jit, static_argnums=(1, 2))
def plan(mask, q: int, k: int):
    """Bounds, and visits by tile of queries and by tile of keys; where a kernel computes its
    ranges, those."""
    T, S = mask.q_positions.shape[1], mask.kv_positions.shape[1]
    more_q, more_k = tiles.padding(T, q), tiles.padding(S, k)
    bounds = tiles.bounds_of(mask, more_q, more_k)
    T, S = T + more_q, S + more_k
    by_query = tiles.query_visits(bounds, q, k, S)
    by_key = tiles.key_visits(bounds, q, k, T, S)
    if bounds.causal_alone:
        s = types.SimpleNamespace(ranged=False, T=T, S=S, q=q, kv=k, group=1)
        by_query = computed(pallas_hopper_mask.key_tiles_of, s, T // q)
        by_key = computed(pallas_hopper_mask.query_tiles_of, s, S // k)
    return bounds, by_query, by_key


def computed(ranges_of, s, count: int) -> tiles.Visits:
    ranges = [jnp.stack(ranges_of(s, None, 0, jnp.int32(tile))) for tile in range(count)]
    return tiles.Visits(jnp.broadcast_to(jnp.stack(ranges), (ROWS, count, 4)), None)


def visits_of(visits: tiles.Visits, row: int, outer: int) -> tuple[list[int], list[int]]:
    """The inner tiles visited with the mask, and those without."""
    begin, whole, masked, end = map(int, visits.ranges[row, outer])
    whole = max(begin, whole)
    masked = max(whole, masked)
    assert begin < end, "at least one visit"
    order = range(1 << 20) if visits.order is None else visits.order[row, outer]
    inner = [int(order[i]) for i in range(begin, max(end, masked))]
    plain = inner[whole - begin : masked - begin]
    assert len(set(inner)) == len(inner), "no tile twice"
    return [tile for tile in inner if tile not in plain], plain


def check(seen: np.ndarray, visits: tiles.Visits, exact: bool) -> None:
    """`seen`: bool [B, outer, inner, rows of queries and keys in a tile].

    `exact`: no tile is visited in vain, and none with the mask that needs none.
    """
    some, whole = seen.any(-1), seen.all(-1)
    visits = jax.tree.map(np.asarray, visits)
    for row, outer in np.ndindex(some.shape[:2]):
        masked, plain = visits_of(visits, row, outer)
        needed = set(np.flatnonzero(some[row, outer]))
        assert needed <= {*masked, *plain}, "a pair is left out"
        assert all(whole[row, outer, plain]), "a tile called whole is not"
        if not needed:
            assert not plain
        if exact:
            assert {*masked, *plain} == needed or (not needed and len(masked) == 1)
            assert not any(whole[row, outer, masked])


@pytest.mark.parametrize(
    ("case", "blocks"),
    slow_but(
        [*((case, (8, 8)) for case in CASES), (CASES[4], (16, 4)), (CASES[7], (4, 16))],
        itertools.product(CASES, BLOCKS),
    ),
    ids=str,
)
def test_visits(case, blocks):
    """In the text's own order, and in zigzag order without documents, nothing is done in vain."""
    case = Case(**(vars(case) | dict(B=ROWS, T=48)))
    mask = mask_of(case, np.random.default_rng(0))
    (q, k), (T, S) = blocks, (case.T, case.keys)
    bounds, by_query, by_key = plan(mask, q, k)
    T_padded, S_padded = T + tiles.padding(T, q), S + tiles.padding(S, k)
    seen = spelt_out(bounds, T_padded, S_padded)
    np.testing.assert_array_equal(seen[:, :T, :S], dense_mask(mask))
    assert not seen[:, :T, S:].any(), "a padded key is seen"
    tiled = seen.reshape(ROWS, T_padded // q, q, S_padded // k, k).transpose(0, 1, 3, 2, 4)
    tiled = tiled.reshape(*tiled.shape[:3], -1)
    check(tiled, by_query, exact=is_exact(case, q, k))
    check(tiled.swapaxes(1, 2), by_key, exact=is_exact(case, q, k))


def is_exact(case: Case, q: int, k: int) -> bool:
    if case.order == "zigzag":  # tiles do not straddle two chunks of 24
        return case.documents is None and 24 % q == 0 and 24 % k == 0
    return case.order == "text"


def test_queries_before_every_key_visit_one_tile_with_the_mask():
    mask = mask_of(Case("late", B=ROWS, T=48), np.random.default_rng(0))
    _, by_query, _ = plan(mask, 8, 8)
    np.testing.assert_array_equal(
        by_query.ranges[:, :3], np.broadcast_to([0, 1, 1, 1], (ROWS, 3, 4))
    )
    np.testing.assert_array_equal(by_query.order[:, :3, 0], 0)


def test_causal_alone_loads_nothing():
    bounds = tiles.bounds_of(mask_of(Case(B=2), np.random.default_rng(0)), 0, 0)
    assert bounds.causal_alone and bounds.queries is None and bounds.keys is None
    assert tiles.query_visits(bounds, 64, 64, 256).ranges is None
    assert tiles.key_visits(bounds, 64, 64, 256, 256).ranges is None


def test_places_of_padding():
    mask = mask_of(Case("permuted", documents=2, window=3), np.random.default_rng(0))
    bounds = tiles.bounds_of(mask, 5, 7)
    assert (np.asarray(bounds.keys)[0, 0, -7:] == LAST).all()
    assert bounds.queries.shape == (1, 3, 261) and bounds.keys.shape == (1, 2, 263)
