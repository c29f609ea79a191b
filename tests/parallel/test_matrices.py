"""The exchange of matrices: whole ones at some device, and shards of the results back."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxpar.components.weight import RULES
from jaxpar.config import ParallelConfig
from jaxpar.parallel.matrices import layout_of, map_matrices
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import ParamSpec, map_specs, partition_specs
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile")

#: One of each way in which matrices are stacked and split. Six layers: not a multiple of devices.
SPECS = {
    name: ParamSpec(shape=shape, axes=axes, columns=columns)
    for name, (shape, axes, columns) in {
        "into heads": ((6, 16, 4, 3), ("layer", "embed", "heads", "head_dim"), 2),
        "out of heads": ((6, 4, 3, 16), ("layer", "heads", "head_dim", "embed"), 1),
        "experts": ((6, 4, 8, 12), ("layer", "experts", "expert_embed", "mlp"), 1),
        "experts' outputs": ((6, 4, 12, 8), ("layer", "experts", "mlp", "expert_embed"), 1),
        "spread experts": (
            (2, 8, 8, 12),
            ("layer", "spread_experts", "expert_embed", "whole_mlp"),
            1,
        ),
        "complete over tensor": ((6, 16, 5), ("layer", "embed", "rank"), 1),
        "of every stage": ((3, 2, 8, 8), ("depth", "rank", "rank", "embed"), 1),
        "whole": ((6, 2, 3), ("layer", "rank", "rank"), 1),
    }.items()
}

MESHES = {
    "data, tensor": {"data": 2, "tensor": 4},
    "every axis": {"replica": 2, "data": 2, "expert": 2, "sequence": 2},
    "stages, experts": {"pipeline": 2, "expert": 2, "sequence": 2, "tensor": 2},
    "replicas, tensor": {"replica": 4, "tensor": 2},
}


def entangled(x: jax.Array) -> jax.Array:
    """A function whose every element depends on the places of all elements of its matrix.

    In whole numbers, so that the order of sums does not matter.
    """
    places = jnp.arange(1, 1 + x[0].size, dtype=x.dtype).reshape(x.shape[1:]) % 7
    return x + places * jnp.sum(x * places.T.reshape(places.shape), axis=(1, 2), keepdims=True)


def whole(name: str, a: jax.Array) -> jax.Array:
    matrices = a.reshape(-1, *SPECS[name].matrix)
    return entangled(matrices).reshape(a.shape)


@pytest.mark.parametrize("mesh", ["every axis", *map(slow, [m for m in MESHES if m[0] != "e"])])
def test_a_function_of_whole_matrices(mesh, devices):
    sizes = MESHES[mesh]
    on = make_mesh(ParallelConfig(**sizes), devices[: math.prod(sizes.values())])
    specs = partition_specs(SPECS)
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(-9, 9, s.shape).astype(np.float32) for n, s in SPECS.items()}
    seen: dict[str, int] = {}

    def on_shards(tree):
        def one(name, spec, a):
            def fn(x):
                seen[name] = len(x)
                return entangled(x)

            return map_matrices(fn, [a], layout_of(spec, a.shape, sharded=True))[0]

        return {name: one(name, SPECS[name], a) for name, a in tree.items()}

    step = jax.jit(jax.shard_map(on_shards, mesh=on, in_specs=(specs,), out_specs=specs))
    placed = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(on, s)), arrays, specs)
    found = step(placed)
    for name, a in arrays.items():
        np.testing.assert_array_equal(found[name], whole(name, a), err_msg=name)
    counts = map_specs(lambda s: math.prod(s.shape[: s.lead]), SPECS)
    for name, spec in SPECS.items():
        of_lead = [axis for logical in spec.axes[: spec.lead] for axis in RULES[logical]]
        parts = math.prod(sizes.get(axis, 1) for axis in of_lead)
        ranks = math.prod(sizes.values()) // parts
        assert seen[name] == math.ceil(counts[name] / parts / ranks), name


def test_parameters_of_one_layout_are_exchanged_together():
    a, b = np.ones((2, 4, 6), np.float32), np.full((3, 4, 6), 2, np.float32)
    spec = functools.partial(ParamSpec, axes=("layer", "embed", "mlp"), columns=1)
    layouts = {layout_of(spec(shape=x.shape), x.shape, sharded=False) for x in (a, b)}
    (layout,) = layouts
    first, second = map_matrices(lambda x: x * len(x), [jnp.asarray(a), jnp.asarray(b)], layout)
    np.testing.assert_array_equal(first, 5 * a)
    np.testing.assert_array_equal(second, 5 * b)
