"""Timing of copies for values that are in host memory between a layer's forward and backward.

The remat policy selects the values (`execution/remat.py`). JAX copies them to the host after they
are computed, and back before they are used. The barriers here control when the copies happen.
Without them, XLA's scheduler would delay the copies to the host, so the values would stay on the
device, and would start the copies back only in the layer's own backward, too late to hide them. No
barrier is added if no value is in host memory.
"""

from typing import Any

import jax
from jax import lax

Space = jax.memory.Space


def in_host_memory(x: Any) -> bool:
    """Return whether an array is in host memory, according to its type."""
    return jax.typeof(x).memory_space == Space.Host


def store_to_host(saved: Any, x: Any) -> tuple[Any, Any]:
    """Return `saved` and `x`, where `x` waits until the host arrays of `saved` have been copied.

    Args:     saved: a tree of values that an earlier layer saved. x: a tree on the device.
    """
    there, restore = _in_host_memory(saved)
    if not there:
        return saved, x
    there, x = lax.optimization_barrier((there, x))
    return restore(there), x


def fetch_from_host(saved: Any, after: Any) -> tuple[Any, Any]:
    """Copy `saved` to the device once `after` is computed. Return both.

    The copies that JAX inserts where the values are used then have nothing to do.
    """
    there, restore = _in_host_memory(saved)
    if not there:
        return saved, after
    there, after = lax.optimization_barrier((there, after))
    return restore(jax.device_put(there, Space.Device)), after


def _in_host_memory(tree: Any):
    """Return the leaves in host memory, and a function that replaces them in the tree."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if in_host_memory(leaf)]

    def restore(values: list[Any]) -> Any:
        moved = dict(zip(places, values, strict=True))
        return jax.tree.unflatten(structure, [moved.get(i, a) for i, a in enumerate(leaves)])

    return [leaves[i] for i in places], restore
