"""Fingerprints of arrays: 64-bit hashes that change with any bit, or with a swap of elements.

An element's bits are mixed with a hash of its position in the global array, hashed twice, and
summed modulo 2^32. Integer sums do not depend on order, so the fingerprint does not depend on the
sharding or on the number of processes, and can be computed one shard at a time. A single changed
element always changes both sums, since the hash is one-to-one; other damage is missed with
probability 2^-64.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.sharding.axes import axes_of
from jaxpar.sharding.hashing import hash_uint32

#: Makes the second sum differ from the first, and rows from columns.
_GOLDEN = 0x9E3779B9


def text(sums: np.ndarray) -> str:
    """Format a fingerprint, uint32 [2], as 16 hexadecimal digits."""
    return "".join(f"{int(number):08x}" for number in sums)


def partial_sums(x: jax.Array, origin: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """Return the contribution of a box of an array to the array's fingerprint.

    Args:     x: the box, of any dtype of 1, 2 or 4 bytes. origin: start of the box in each dim of
              the global array, integers or int32 scalars. shape: of the global array.
    Returns:  uint32 [2].
    """
    if x.ndim == 0:
        x, origin, shape = x[None], (0,), (1,)
    column, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for dim in reversed(range(1, x.ndim)):
        place = _places(x.shape[dim], origin[dim]) * jnp.uint32(stride & 0xFFFFFFFF)
        column += lax.broadcast_in_dim(place, x.shape, (dim,))
        stride *= shape[dim]
    # Rows are hashed separately, since one index over all elements would not fit 32 bits.
    row = hash_uint32(_places(x.shape[0], origin[0]) + jnp.uint32(_GOLDEN))
    place = hash_uint32(column ^ lax.broadcast_in_dim(row, x.shape, (0,)))
    first = hash_uint32(_bits(x) ^ place)
    second = hash_uint32(first + jnp.uint32(_GOLDEN))
    return jnp.stack([jnp.sum(first, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)])


def _places(size: int, origin: Any) -> jax.Array:
    return jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(origin).astype(jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    """Return the raw bits of each element, uint32."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def local_sums(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return the contribution of this device's shard to the fingerprint, inside a `shard_map`.

    Args:     x: the shard. spec: the partitioning of the global array.
    Returns:  uint32 [2].
    """
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        x = jax.device_put(x, jax.memory.Space.Device)
    return _local_sums(x, spec)


# A function of its own, traced once for all arrays of one shape: weights and their moments.
@functools.partial(jax.jit, static_argnums=1)
def _local_sums(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    cut = [spec[dim] if dim < len(spec) else None for dim in range(x.ndim)]
    sizes = zip(x.shape, cut, strict=True)
    shape = [n if axes is None else n * lax.axis_size(axes) for n, axes in sizes]
    begins = zip(x.shape, cut, strict=True)
    origin = [0 if axes is None else lax.axis_index(axes) * n for n, axes in begins]
    return partial_sums(x, origin, shape)


@functools.cache
def _program(shardings: tuple[Any, ...]):
    """Return a compiled program: arrays with these shardings to fingerprints, uint32 [arrays, 2].

    The program has one all-reduce for all arrays. The first device that holds a shard counts it.
    """
    if not isinstance(shardings[0], NamedSharding):  # unsharded, on one device
        return jax.jit(lambda arrays: jnp.stack([local_sums(x, PartitionSpec()) for x in arrays]))
    specs, mesh = tuple(sharding.spec for sharding in shardings), shardings[0].mesh

    def own(arrays: tuple[jax.Array, ...]) -> jax.Array:
        counted = [
            jnp.where(_is_first(spec, mesh.axis_names), local_sums(x, spec), 0)
            for x, spec in zip(arrays, specs, strict=True)
        ]
        stacked = jnp.stack([_varying(sums, mesh.axis_names) for sums in counted])
        return lax.psum(stacked, mesh.axis_names)

    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec()))


def _is_first(spec: PartitionSpec, axes: Sequence[str]) -> jax.Array:
    """Return whether this is the first device that holds its shard."""
    replicated = tuple(axis for axis in axes if axis not in axes_of(spec))
    return lax.axis_index(replicated) == 0 if replicated else jnp.bool_(True)


def _varying(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Return the same value, typed as varying over all axes."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def fingerprints(tree: Any) -> dict[str, str]:
    """Compute the fingerprint of every array of a tree, on the devices that hold it.

    Args:     tree: of arrays with NamedShardings on one mesh, over any number of processes, or
              unsharded on one device; in device or host memory. All processes make the same call.
    Returns:  fingerprints by name: {"params/layers/wq": "0123456789abcdef", ...}.
    Communication: one all-reduce of 8 bytes per array; for each array in host memory, another.
    """
    found: dict[str, np.ndarray] = {}
    for group in _groups(named_leaves(tree)):
        program = _program(tuple(x.sharding for x in group.values()))
        # Fetch before the next program starts: on CPUs, collectives of two programs can deadlock.
        sums = jax.device_get(program(tuple(group.values())))
        found |= dict(zip(group, sums, strict=True))
    return {name: text(found[name]) for name in named_leaves(tree)}


def compile_fingerprints(tree: Any) -> None:
    """Compile what `fingerprints` runs for such a tree, and run nothing.

    Args:     tree: as for `fingerprints`, or abstract arrays with shardings.
    """
    for group in _groups(named_leaves(tree)):
        program = _program(tuple(x.sharding for x in group.values()))
        program.lower(tuple(group.values())).compile()  # JAX keeps it for calls


def _groups(leaves: dict[str, Any]) -> list[dict[str, Any]]:
    """Group arrays into programs: all arrays in device memory in one, and one for each array in
    host memory, since the program copies the full shard to the device."""
    on_host = {name: x for name, x in leaves.items() if x.sharding.memory_kind == "pinned_host"}
    on_device = {name: x for name, x in leaves.items() if name not in on_host}
    by_kind: dict[bool, dict[str, Any]] = {}
    for name, x in on_device.items():
        by_kind.setdefault(isinstance(x.sharding, NamedSharding), {})[name] = x
    return [*by_kind.values(), *({name: x} for name, x in on_host.items())]


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their names in a checkpoint: "opt_state/0/mu/layers/wq"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(path_names(path)): leaf for path, leaf in leaves}


def path_names(path: Any) -> list[str]:
    """Return the names of a path's keys."""
    return [str(_key(key)) for key in path]


def _key(key: Any) -> Any:
    """Return the name of a path's key: of a dict, a sequence or an attribute."""
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return getattr(key, field)
    raise TypeError(f"{key!r} is not a key of a state")


@functools.cache
def _box_program(shape: tuple[int, ...]):
    """Return `partial_sums` compiled for boxes of an array of `shape`."""
    return jax.jit(lambda x, origin: partial_sums(x, origin, shape))


class RunningFingerprint:
    """Fingerprint of an array that is read or written box by box, each element once."""

    def __init__(self, shape: Sequence[int]):
        self._shape, self._sums = tuple(shape), np.zeros(2, np.uint32)

    def add(self, values: Any, origin: Sequence[int]) -> None:
        """Add a box that starts at `origin`."""
        program = _box_program(self._shape)
        self._sums += np.asarray(program(values, np.asarray(origin, np.int64).astype(np.uint32)))

    def __str__(self) -> str:
        return text(self._sums)
