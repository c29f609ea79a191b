"""Fingerprints: the same however an array is cut, another one after any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.config import ParallelConfig
from jaxpar.sharding.fingerprint import RunningFingerprint, fingerprints, text
from jaxpar.sharding.grid import grid
from jaxpar.sharding.hashing import hash_uint32
from jaxpar.sharding.mesh import make_mesh
from tests.fingerprints import sums_of

VALUES = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)


def of(values) -> str:
    """The fingerprint of one array, whole on one device."""
    return fingerprints({"a": jax.device_put(jnp.asarray(values), jax.devices()[0])})["a"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float8_e4m3fn"])
def test_any_cut_has_the_same_fingerprint(dtype, devices):
    values = jnp.asarray(VALUES).astype(dtype)
    mesh = make_mesh(ParallelConfig(replica=2, data=2, tensor=2), devices[:8])
    specs = [PartitionSpec(), PartitionSpec("data", "tensor"), PartitionSpec(("tensor", "data"))]
    tree = {str(i): jax.device_put(values, NamedSharding(mesh, s)) for i, s in enumerate(specs)}
    assert set(fingerprints(tree).values()) == {of(values)}


@pytest.mark.parametrize("chunk", [(3, 5), (8, 1)])
def test_boxes_that_are_read_one_by_one_add_up_to_it(chunk):
    running = RunningFingerprint(VALUES.shape)
    for box in reversed(list(grid(VALUES.shape, chunk))):
        running.add(VALUES[box], [part.start for part in box])
    assert str(running) == of(VALUES)


def test_any_change_is_another_fingerprint():
    bits = VALUES.view(np.uint32)
    changed = []
    for bit in range(32):
        other = bits.copy()
        other[bit % 8, bit % 12] ^= np.uint32(1 << bit)
        changed.append(other.view(np.float32))
    swapped = VALUES.copy()
    swapped[0, 0], swapped[0, 1] = VALUES[0, 1], VALUES[0, 0]
    others = [*changed, swapped, VALUES[::-1], VALUES.reshape(12, 8), -VALUES]
    seen = {of(values) for values in (VALUES, *others)}
    assert len(seen) == 1 + len(others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (5,), (8, 12), (2, 3, 4, 5), (3, 0)])
def test_the_fingerprints_of_tests_are_the_programs(shape, dtype):
    values = np.random.default_rng(1).normal(size=shape).astype(jnp.dtype(dtype))
    assert text(sums_of(values)) == of(values)


def test_names_are_those_of_the_tree():
    tree = {"params": {"w": jnp.ones(3)}, "moments": [jnp.zeros(2), jnp.float32(1)]}
    assert list(fingerprints(tree)) == ["moments/0", "moments/1", "params/w"]


def test_the_hash_is_one_to_one():
    x = jnp.arange(2**16, dtype=jnp.uint32)
    assert (
        len(np.unique(np.asarray(hash_uint32(x))))
        == len(np.unique(np.asarray(hash_uint32(x << 16))))
        == 2**16
    )
