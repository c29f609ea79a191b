"""Arrays of layers of a pipeline with unequal stages, in a checkpoint's form and in the step's.

running   [slots, ...], with slots split over PIPELINE: as many on each stage, some empty.
logical   [layers, ...], as on every mesh. Layers cannot be split evenly, so PIPELINE splits
          another dim; a small array that has none that divides is replicated over it.

Arrays of layers that are composed of the rows of others (`checkpoint/by_place.py`) take the same
way: each device first has some columns of all rows.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.parallel.collectives import all_gather, all_to_all
from jaxpar.sharding.axes import PIPELINE
from jaxpar.step.layer_order import EMPTY

Space = jax.memory.Space


def logical_sharding(
    running: NamedSharding, shape: tuple[int, ...], layers: int = 0
) -> NamedSharding:
    """Return the sharding of the logical form of an array.

    Args:     running: sharding of the running form. shape: of either form. layers: the dim of
              layers, which PIPELINE splits.
    """
    mesh, spec = running.mesh, [_axes(entry) for entry in running.spec]
    spec += [()] * (len(shape) - len(spec))
    larger = [axis for axis in spec[layers] if mesh.shape[axis] > 1]
    assert larger == [PIPELINE], f"layers are split over the pipeline only, not as {running}"
    spec[layers] = ()
    for dim in (dim for dim in range(len(shape)) if dim != layers):
        ways = math.prod(mesh.shape[axis] for axis in (*spec[dim], PIPELINE))
        if shape[dim] % ways == 0:
            spec[dim] = (*spec[dim], PIPELINE)
            break
    return NamedSharding(mesh, _spec(spec), memory_kind=running.memory_kind)


def is_split(to: NamedSharding, layers: int) -> bool:
    """Return whether several stages share the dim of layers of an array."""
    return any(to.mesh.shape[axis] > 1 for axis in _axes_at(to, layers))


def from_rows(
    sources: Sequence[jax.Array], rows: Sequence[int], to: NamedSharding, layers: int
) -> jax.Array:
    """Return an array of layers that is composed of rows of others.

    Args:     sources: with all rows on each device, as `logical_sharding` has them if `to` is
              split. rows: index of each row of the result, in the sources one after the other.
              to: sharding of the result. layers: the dim of rows.
    Communication: as `to_slots`, if `to` is split; an all-gather over PIPELINE if only the sources
              are.
    """
    shardings = tuple(source.sharding for source in sources)
    return _from_rows(shardings, to, tuple(rows), layers, sources[0].ndim)(*sources)


@functools.cache
def _from_rows(
    shardings: tuple[Any, ...], to: NamedSharding, rows: tuple[int, ...], layers: int, ndim: int
):
    """Return the compiled program of `from_rows`."""
    dims = [dim for dim in range(ndim) if dim != layers]
    (at,) = {next((d for d in dims if PIPELINE in _axes_at(s, d)), None) for s in shardings}
    split = is_split(to, layers)

    def local(*parts: jax.Array) -> jax.Array:
        x = jnp.take(jnp.concatenate(parts, layers), np.array(rows), axis=layers)
        if split:
            return _of_stage(x, at, layers)
        return x if at is None or PIPELINE in _axes_at(to, at) else all_gather(x, PIPELINE, at)

    specs = tuple(sharding.spec for sharding in shardings)
    # The check cannot know that an all-gather gives all devices the same.
    convert = jax.shard_map(local, mesh=to.mesh, in_specs=specs, out_specs=to.spec, check_vma=False)
    on_device = lambda *xs: convert(*jax.device_put(xs, Space.Device))  # noqa: E731
    return jax.jit(on_device, out_shardings=to)


def running_sharding(logical: NamedSharding) -> NamedSharding:
    """Undo `logical_sharding`."""
    spec = [tuple(a for a in _axes(entry) if a != PIPELINE) for entry in logical.spec]
    spec[0] = (PIPELINE,)
    return NamedSharding(logical.mesh, _spec(spec), memory_kind=logical.memory_kind)


def to_slots(x: jax.Array, order: np.ndarray) -> jax.Array:
    """Convert the logical form to the running form.

    Args:     x: any dtype; in device or host memory, like the result. order: int [slots], the layer
              in each slot or EMPTY.
    Communication: an all-to-all of the array over PIPELINE, or none if it is replicated.
    """
    logical: Any = x.sharding
    return _program(_fill_slots, logical, running_sharding(logical), tuple(order))(x)


def to_layers(x: jax.Array, order: np.ndarray, *, on_host: bool = False) -> jax.Array:
    """Convert the running form to the logical form.

    Args:     as `to_slots`. on_host: put the result in pinned host memory.
    Communication: an all-to-all of the array over PIPELINE, or an all-gather if it is replicated.
    """
    running: Any = x.sharding
    to = logical_sharding(running, x.shape)
    to = to.with_memory_kind("pinned_host") if on_host else to
    return _program(_read_slots, running, to, tuple(order))(x)


@functools.cache
def _program(body: Any, source: NamedSharding, to: NamedSharding, order: tuple[int, ...]):
    """Return a compiled conversion, computed on the device. Takes as much memory again."""
    logical = to if body is _read_slots else source
    dims = [dim for dim, entry in enumerate(logical.spec) if PIPELINE in _axes(entry)]
    local = functools.partial(body, np.array(order), dims[0] if dims else None)
    # The check cannot know that an all-gather gives all devices the same.
    convert = jax.shard_map(
        local, mesh=source.mesh, in_specs=source.spec, out_specs=to.spec, check_vma=False
    )
    return jax.jit(lambda x: convert(jax.device_put(x, Space.Device)), out_shardings=to)


def _fill_slots(order: np.ndarray, dim: int | None, x: jax.Array) -> jax.Array:
    """[layers, ...], with `dim` split over PIPELINE -> this stage's slots."""
    used = (order != EMPTY).reshape(-1, *[1] * (x.ndim - 1))
    x = jnp.where(used, x[np.maximum(order, 0)], jnp.zeros((), x.dtype))
    return _of_stage(x, dim, 0)


def _of_stage(x: jax.Array, dim: int | None, layers: int) -> jax.Array:
    """All rows, with `dim` split over PIPELINE -> this stage's rows."""
    if dim is not None:
        return all_to_all(x, PIPELINE, layers, dim)
    n = x.shape[layers] // lax.axis_size(PIPELINE)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(PIPELINE) * n, n, layers)


def _read_slots(order: np.ndarray, dim: int | None, x: jax.Array) -> jax.Array:
    """This stage's slots -> [layers, ...], with `dim` split over PIPELINE."""
    x = all_gather(x, PIPELINE, 0) if dim is None else all_to_all(x, PIPELINE, dim, 0)
    slots = np.argsort(np.where(order == EMPTY, len(order), order), stable=True)
    return x[slots[: np.sum(order != EMPTY)]]


def _axes_at(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    return _axes(sharding.spec[dim]) if dim < len(sharding.spec) else ()


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(axes: list[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(entry or None for entry in axes))
