"""The Hopper kernels on a CPU, in Pallas' interpreter: numbers, races, and every barrier.

Against the reference in float32. The interpreter runs a kernel's threads for real, with a vector
clock for each, and calls two accesses that no barrier orders a race. It sees neither accumulators
in registers (`pallas_hopper_mma.py`) nor additions in memory; `test_attention_gpu.py` does.
"""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.kernels.attention import tiles as order
from jaxpar.kernels.attention.hopper.blocks import BackwardBlocks, ForwardBlocks
from jaxpar.kernels.attention.reference import EMPTY_LSE
from jaxpar.kernels.attention.tiles import lanes_at_a_time, tile_and_lane
from tests.kernels.cases import Case, check, inputs_of, interpreted, interpreter, reference_of
from tests.slow import slow

CASES = [
    Case(T=1, H=1, K=128),
    slow(Case(B=2, T=200, dtype="float16")),
    slow(Case(T=300, K=128)),
    slow(Case(T=300, H=1, documents=7)),
    slow(Case(T=260, H=1, window=70)),
    slow(Case("permuted", T=300, S=140, H=1, K=128)),
    slow(Case("zigzag", T=256, S=512, H=1, K=128)),
    slow(Case("late", T=320, S=130)),
    slow(Case("late", T=200, S=130)),
]

DETERMINISTIC = [
    slow(Case(T=300, K=128)),
    slow(Case("permuted", T=200, S=310, documents=5, window=60)),
    slow(Case("permuted", T=140, S=200, documents=5, window=60)),
]

SLOW = [
    Case(T=256, H=1, K=128, documents=4, window=90),
    Case("permuted", T=200, S=310, H=3, documents=5, window=60),
    Case(T=300, K=256),
    Case(T=300, K=256, documents=6, dtype="float16"),
    Case("permuted", T=200, S=310, K=256, documents=5, window=60),
    Case(B=2, T=520, H=6, G=2, K=128, documents=9),
    Case("zigzag", T=512, S=2048, H=1, K=128, documents=12),
]


@pytest.fixture
def races():
    """Interpret in this test."""
    with interpreter() as races:
        yield races


def run(case: Case, races, **options):
    x = inputs_of(case)
    found = interpreted(x, **options)
    assert not any(races())
    check(found, reference_of(x), case.dtype)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_backward(case, races):
    out, lse, dq, _, _ = run(case, races)
    assert len(races()) == 2
    if case.order == "late":
        unseeing = slice(0, case.T // 2)
        assert (np.asarray(lse)[:, :, unseeing] == EMPTY_LSE).all()
        assert not np.any(out[:, unseeing]) and not np.any(dq[:, unseeing])


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_deterministic_backward(case, races):
    run(case, races, deterministic=True)
    assert len(races()) == 3, "a kernel of its own for dq"


@pytest.mark.parametrize("at_a_time", [0, 1, 2, 3, 4, 6, 12, 24])
def test_every_tile_of_every_lane_once(at_a_time):
    tiles, lanes = 5, 12
    found = [tile_and_lane(jnp.int32(n), tiles, lanes, at_a_time) for n in range(tiles * lanes)]
    assert len({(int(tile), int(lane)) for tile, lane in found}) == len(found)
    together = math.gcd(at_a_time, lanes)
    first = {int(lane) for _, lane in found[: tiles * together]}
    assert first == set(range(together)), "all tiles of these, before any of the next"
    assert [int(tile) for tile, _ in found[:together]] == [0] * together


@pytest.mark.parametrize(
    ("tiles", "lanes", "wanted", "together"),
    [
        (32, 64, 0, 64),
        (32, 64, 1, 4),  # 128 tiles for 132 multiprocessors
        (64, 16, 1, 2),
        (64, 16, 4, 4),
        (96, 8, 1, 2),
        (128, 8, 1, 1),
        (256, 8, 1, 1),
        (256, 8, 2, 2),
        (16, 64, 1, 8),
        (16, 6, 1, 6),  # fewer lanes than that takes
        (44, 20, 1, 4),  # 3 do not divide them
        (44, 7, 1, 7),
        (1, 3, 2, 3),
    ],
)
def test_lanes_that_are_worked_on_together(tiles, lanes, wanted, together):
    assert lanes_at_a_time(tiles, lanes, wanted) == together


@pytest.mark.slow
def test_one_kv_head_at_a_time(races, monkeypatch):
    monkeypatch.setattr(order, "MULTIPROCESSORS", 1)
    sizes = ForwardBlocks(heads=1), BackwardBlocks(heads=1)
    run(Case(T=130, H=2, G=2, K=128), races, forward_blocks=sizes[0], blocks=sizes[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_more(case, races):
    run(case, races)


@pytest.mark.slow
def test_the_detector_is_awake(races, monkeypatch):
    """Results that the copy engine may take before they are in shared memory are a race."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    interpreted(inputs_of(Case(T=1, H=1)))
    assert races() == [True, True]
