"""Copies of a state on GPUs in host memory: all bits, from every GPU that this process has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.checkpoint.copies import HostCopy

pytestmark = pytest.mark.gpu


def arrays(devices: list) -> dict[str, jax.Array]:
    """Arrays of 8 MB and less: sharded, replicated, of two dtypes, a scalar."""
    mesh = Mesh(np.array(devices), ("data",))
    put = lambda values, *spec: jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    numbers = jax.random.normal(jax.random.key(0), (2048, 1024), jnp.float32)
    return {
        "sharded": put(numbers, "data"),
        "the other axis": put(numbers.astype(jnp.bfloat16), None, "data"),
        "whole": put(numbers[:100]),
        "scalar": put(jnp.int32(7)),
    }


@pytest.mark.several_gpus
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_copy_has_every_bit_and_later_ones_too(count, devices):
    if count > len(devices):
        pytest.skip(f"needs {count} GPUs")
    state = arrays(devices[:count])
    with HostCopy(state) as host:
        assert not host.by_xla
        host.begin()
        for number in range(3):
            now = jax.tree.map(lambda x, number=number: x + number, state)
            copy = host.take(now)
            for name, x in now.items():
                assert {device.platform for device in copy[name].devices()} == {"cpu"}
                np.testing.assert_array_equal(copy[name], x)
        pinned = [one for one in host._memory.values() if one._unpin is not None]
        assert len(pinned) >= count
