"""Stochastic rounding: to a neighbor, without bias, and by an element's place alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpar.optimizer.stochastic_rounding import random_bits, round_to_bfloat16
from jaxpar.sharding.hashing import hash_uint32, places

#: Keys of so many steps.
KEYS = jax.vmap(hash_uint32)(jnp.arange(4096, dtype=jnp.uint32))


def rounded(values, keys=KEYS) -> np.ndarray:
    """[keys, n] float32: the values, rounded once with each key."""
    x = jnp.asarray(values, jnp.float32)
    rows = jnp.arange(len(x))
    each = jax.vmap(lambda k: round_to_bfloat16(x, random_bits(k, x.shape, PartitionSpec(), rows)))
    return np.asarray(jax.jit(each)(keys).astype(jnp.float32))


VALUES = np.array([1.0001, 1.003, -1.0077, 3.14159, 2.7e-5, -1e-30, 123456.7, 0.1], np.float32)


def test_a_value_goes_to_one_of_its_neighbors_and_on_average_nowhere():
    found = rounded(VALUES)
    low = np.abs(VALUES.view(np.uint32) >> 16 << 16).astype(np.uint32).view(np.float32)
    high = ((VALUES.view(np.uint32) >> 16 << 16) + (1 << 16)).astype(np.uint32).view(np.float32)
    assert np.all((found == low) | (found == high))
    assert np.all((found == low).any(0) & (found == high).any(0) | (np.abs(VALUES - low) < 1e-9))
    share = (VALUES - low) / (high - low)
    error = (found == high).mean(0) - share
    assert np.all(np.abs(error) < 5 * np.sqrt(share * (1 - share) / len(KEYS)) + 1e-9), error


def test_what_bfloat16_can_hold_stays():
    exact = np.array([0.0, -0.0, 1.0, -2.5, 2.0**-126, np.inf, -np.inf, 3.0e38], np.float32)
    exact[-1] = np.asarray(jnp.bfloat16(3.0e38).astype(jnp.float32))
    found = rounded(exact, KEYS[:64])
    assert np.all(found.view(np.uint32) == exact.view(np.uint32))
    assert np.all(np.isnan(rounded([np.nan], KEYS[:64])))


def average(decay: float, steps: int, stochastic: bool) -> float:
    """The mean over 4096 elements of 1.0, multiplied by `decay` so often, kept in bfloat16."""
    rows = jnp.arange(4096)

    def step(x, key):
        x = decay * x.astype(jnp.float32)
        bits = random_bits(key, x.shape, PartitionSpec(), rows)
        return round_to_bfloat16(x, bits) if stochastic else x.astype(jnp.bfloat16), None

    x = jnp.ones(4096, jnp.bfloat16)
    return float(jax.jit(lambda x: jax.lax.scan(step, x, KEYS[:steps])[0])(x).mean())


def test_a_slow_average_moves_and_rounding_to_the_nearest_stands_still():
    """0.999 ** 1000 = 0.368; to the nearest, 0.999 rounds up to 1 for ever."""
    assert average(0.999, 1000, stochastic=False) == 1.0
    assert average(0.999, 1000, stochastic=True) == pytest.approx(0.999**1000, rel=5e-3)
    assert average(0.95, 40, stochastic=True) == pytest.approx(0.95**40, rel=5e-3)


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec(None, ("a", "b")),
        PartitionSpec("a", "b"),
        PartitionSpec(("b", "a"), None),
        PartitionSpec("a", None, "b"),
    ],
)
def test_the_mesh_has_no_say_in_the_numbers(spec, devices):
    shape, key = (8, 16, 4), hash_uint32(jnp.uint32(7))
    mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2, devices=devices[:8])
    spec = PartitionSpec(*spec, *(None,) * (3 - len(spec)))

    def local(x):
        return random_bits(key, x.shape, spec, places(len(x), spec[0]))

    blank = jnp.zeros(shape, jnp.uint32)
    cut = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(blank)
    whole = random_bits(key, shape, PartitionSpec(None, None, None), jnp.arange(8))
    np.testing.assert_array_equal(cut, whole)


def test_rows_of_another_order_keep_their_numbers():
    key, spec = hash_uint32(jnp.uint32(7)), PartitionSpec(None, None)
    whole = random_bits(key, (8, 3), spec, jnp.arange(8))
    order = jnp.array([3, 0, 7])
    np.testing.assert_array_equal(random_bits(key, (3, 3), spec, order), whole[order])


@pytest.mark.slow
def test_numbers_look_random():
    """Each bit as often set as not, whatever bit of a neighbor is set; no number twice as often as
    chance has it."""
    bits = np.asarray(random_bits(KEYS[3], (512, 512), PartitionSpec(None, None), jnp.arange(512)))
    unpacked = (bits[..., None] >> np.arange(32)) & 1
    spread = 5 * 0.5 / np.sqrt(bits.size)
    assert np.abs(unpacked.mean((0, 1)) - 0.5).max() < spread
    for other in (np.roll(unpacked, 1, 0), np.roll(unpacked, 1, 1), np.roll(unpacked, 1, 2)):
        assert np.abs((unpacked == other).mean((0, 1)) - 0.5).max() < spread
    expected = bits.size - bits.size**2 / 2**33  # distinct ones among so many of 2 ** 32
    assert abs(len(np.unique(bits)) - expected) < 5 * np.sqrt(bits.size**2 / 2**33)
