"""Weights whose gradients are float32 where they are made, to be added up over microbatches.

The gradient of a bfloat16 weight would be a bfloat16 array: written, read again, and added to a
float32 sum that is read and written, 10 bytes a weight in two passes. A matmul whose result is
float32 adds to the sum itself (cuBLAS's beta), while it multiplies, and rounds nothing in between.

JAX gives an array a gradient of its own dtype. So the gradient is that of a second array, of zeros,
which nothing reads and XLA never makes.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives import varying

type Tree = dict[str, Any]


@flax.struct.dataclass
class Weight:
    """A weight to multiply by, and arrays whose gradients are the weight's."""

    values: Any
    """[in, out] in the compute dtype. None in a gradient."""
    gradients: tuple[Any, ...]
    """[in, out] float32 each, one for every matmul that the weight is used in, never read: sums of
    gradients go through them one by one. None each, where it is only said how many there are."""


def is_weight(leaf: Any) -> bool:
    """Whether a leaf of a layer's view takes float32 gradients."""
    return isinstance(leaf, Weight)


def opened(w: Tree, names: tuple[str, ...], uses: int) -> Tree:
    """A layer's weights, of which the named ones take float32 gradients from `uses` matmuls."""
    return opened_again(w | {n: Weight(w[n], (None,) * uses) for n in names if n in w})


def closed(w: Tree) -> Tree:
    """Without the arrays of zeros, which a barrier would make real."""
    return _with_gradients(w, lambda a: (None,) * len(a.gradients))


def opened_again(w: Tree) -> Tree:
    """What `closed` was given."""
    zeros = lambda a: varying(jnp.zeros(a.values.shape, jnp.float32))  # noqa: E731
    return _with_gradients(w, lambda a: tuple(zeros(a) for _ in a.gradients))


def for_use(w: Tree, i: int) -> Tree:
    """The weights for the i-th matmul of each."""
    return _with_gradients(w, lambda a: a.gradients[i : i + 1])


def of_gradients(grads: Tree) -> Tree:
    """Gradients, of which those of the weights themselves are none."""
    return {n: g.replace(values=None) if is_weight(g) else g for n, g in grads.items()}


def added(total: jax.Array, part: Any) -> jax.Array:
    """A float32 sum, and a gradient more: an array, or as a `Weight` takes it."""
    for gradient in part.gradients if is_weight(part) else (part,):
        # In this order: of two matmuls in a sum, XLA has the one on the left add the other operand.
        total = gradient.astype(jnp.float32) + total
    return total


def _with_gradients(w: Tree, gradients: Any) -> Tree:
    return {n: a.replace(gradients=gradients(a)) if is_weight(a) else a for n, a in w.items()}
