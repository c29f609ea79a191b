"""Orders of the sequences: every sequence once per epoch at any length, and always the same."""

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest

from jaxpar.data.shuffle import sequence_order
from tests.slow import slow

#: Around each power of two, where the cipher's range changes.
AROUND = [(1 << bits) + more for bits in range(16, 20) for more in (-1, 0, 1)]
LARGE = [(1 << bits) + 1 for bits in range(20, 24)]


def is_permutation(order: np.ndarray) -> bool:
    """Whether it has each of its indices once."""
    return np.array_equal(np.bincount(order, minlength=len(order)), np.ones(len(order)))


def test_every_small_length_is_a_permutation_in_each_epoch():
    for count in range(1, 600):
        order = sequence_order(count, seed=count)(np.arange(3 * count))
        assert all(map(is_permutation, order.reshape(3, count))), count


@pytest.mark.parametrize("count", [*AROUND, *map(slow, LARGE), slow((1 << 24) - 1)])
def test_every_sequence_is_once_in_an_epoch(count):
    for epoch in (0, 3):
        assert is_permutation(sequence_order(count, seed=0)(np.arange(count) + epoch * count))


@pytest.mark.parametrize("bits", range(24, 40))
def test_no_sequence_twice_among_many_of_a_long_epoch(bits):
    """A sample of both ends: in range, and none twice, also around the power of two."""
    for count in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1):
        numbers = np.r_[0:20_000, count - 20_000 : count]
        found = sequence_order(count, seed=bits)(numbers)
        assert len(np.unique(found)) == len(numbers)
        assert found.min() >= 0 and found.max() < count
        assert found.max() > 0.999 * count and found.min() < 0.001 * count


def test_any_numbers_in_any_order_are_the_same():
    order = sequence_order(1000, seed=5)
    whole = order(np.arange(5000))
    numbers = np.random.default_rng(0).integers(5000, size=300)
    np.testing.assert_array_equal(order(numbers), whole[numbers])
    assert [int(order(np.array([n]))[0]) for n in (0, 999, 1000)] == whole[[0, 999, 1000]].tolist()
    assert len(order(np.array([], np.int64))) == 0


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [
        sequence_order(100, seed)(np.arange(100) + 100 * epoch)
        for seed, epoch in itertools.product((0, 1, 2**31 - 1), range(4))
    ]
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)
    np.testing.assert_array_equal(sequence_order(7, None)(np.arange(9)), [*range(7), 0, 1])


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_permutation_is_as_frequent(count):
    kinds = math.factorial(count)
    orders = sequence_order(count, seed=1)(np.arange(100 * kinds * count)).reshape(-1, count)
    found = Counter(map(tuple, orders.tolist()))
    chi_squared = sum((found[p] - 100) ** 2 / 100 for p in itertools.permutations(range(count)))
    assert chi_squared < kinds - 1 + 5 * math.sqrt(2 * kinds)


@pytest.mark.parametrize("count", [64, 256, 1000])
def test_places_and_neighbors_are_those_of_chance(count):
    """Over 20 epochs. With four rounds of the cipher, the last case fails."""
    orders = sequence_order(count, seed=2)(np.arange(20 * count)).reshape(-1, count)
    places = np.bincount((np.arange(count) * count + orders).ravel(), minlength=count * count)
    steps = np.bincount((np.diff(orders) % count).ravel(), minlength=count)[1:]
    for seen, freedom in ((places, (count - 1) ** 2), (steps, count - 2)):
        expected = seen.sum() / len(seen)
        chi_squared = np.sum((seen - expected) ** 2 / expected)
        assert abs(chi_squared - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("count", [300_000, 1_000_003, slow(10_000_000), 1_000_000_000])
def test_order_is_random_enough(count):
    """Neighbors in the order are not neighbors in the text, and each stretch covers it all."""
    drawn = 10_000
    x = sequence_order(count, 0)(np.arange(drawn + 1)) / count
    expected = drawn / 64
    pairs = np.histogram2d(x[:-1], x[1:], 8, [(0, 1), (0, 1)])[0]
    chi_squared = np.sum((pairs - expected) ** 2 / expected)
    assert chi_squared < 63 + 5 * np.sqrt(2 * 63)


#: Resumed runs rely on this order: it must never change.
KNOWN = {
    7: [3, 0, 1, 2, 0, 5],
    65_537: [49685, 15393, 62190, 51138, 54217, 61532],
    3 << 40: [
        307880959919,
        477648763201,
        970608579682,
        1508352524306,
        2638655355996,
        466306736693,
    ],
}


@pytest.mark.parametrize("count", KNOWN)
def test_the_order_stays_the_same(count):
    numbers = [0, 1, 2, count - 1, count, 5 * count]
    found = sequence_order(count, 3)(np.array(numbers)).tolist()
    assert found == KNOWN[count], json.dumps(found)
