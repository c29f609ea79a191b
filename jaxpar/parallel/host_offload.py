"""Values that wait in host memory between a layer's forward and its backward.

`execution/remat.py` says which; JAX copies them to the host where they are made, and back where
they are used. What is left to do is when. XLA's scheduler knows no reason to hurry a copy out, so
the value would stay on the device meanwhile, and it may not begin a copy back before the layer's
own backward: too late to hide. The barriers here give it both reasons. None is there without a
value in host memory.
"""

from typing import Any

import jax
from jax import lax

Space = jax.memory.Space


def in_host_memory(x: Any) -> bool:
    """Whether an array's type says that it lies in host memory."""
    return jax.typeof(x).memory_space == Space.Host


def store_to_host(saved: Any, x: Any) -> tuple[Any, Any]:
    """`saved` and `x`; `x` is not there before those of `saved` for host memory have arrived.

    Args:     saved: a tree, of a layer before. x: a tree on the device.
    """
    there, restore = _in_host_memory(saved)
    if not there:
        return saved, x
    there, x = lax.optimization_barrier((there, x))
    return restore(there), x


def fetch_from_host(saved: Any, after: Any) -> tuple[Any, Any]:
    """`saved`, all on the device, copied from when `after` is there; and `after`.

    The copies that the values' own users would make then have nothing to do.
    """
    there, restore = _in_host_memory(saved)
    if not there:
        return saved, after
    there, after = lax.optimization_barrier((there, after))
    return restore(jax.device_put(there, Space.Device)), after


def _in_host_memory(tree: Any):
    """The leaves in host memory, and how to put others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if in_host_memory(leaf)]

    def restore(values: list[Any]) -> Any:
        moved = dict(zip(places, values, strict=True))
        return jax.tree.unflatten(structure, [moved.get(i, a) for i, a in enumerate(leaves)])

    return [leaves[i] for i in places], restore
