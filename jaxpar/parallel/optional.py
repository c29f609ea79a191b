"""Layers that only some stages of a pipeline have.

All stages execute one program. A stage that has no layer in a slot passes the residual stream on,
and the slot's gradients are zeros. Either a branch skips the layer, or the layer is computed and
its result dropped: its collectives may need the devices of all stages.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.staged_model import zeros_like_type


def result(layer: Callable[[], Any], x: Any, used: Any, *, skips: bool) -> Any:
    """Return `layer()` if it is used, otherwise x.

    Args:     x: the layer's input, any tree of arrays. used: bool scalar, or None for True. skips:
              whether a layer that is not used is skipped rather than computed.
    """
    if used is None:
        return layer()
    return lax.cond(used, layer, lambda: x) if skips else select(used, layer(), x)


def forward(run: Callable[[], tuple[Any, Any]], x: Any, used: Any, *, skips: bool):
    """Return a layer's output and its pullback, or x and a pullback that must not be called.

    Args:     run: returns both, as `jax.vjp` does. Others as in `result`.
    """
    if used is None:
        return run()
    if not skips:
        y, pullback = run()
        return select(used, y, x), pullback
    structure = None

    def flat() -> tuple[Any, list[jax.Array]]:
        nonlocal structure
        y, pullback = run()
        residuals, structure = jax.tree.flatten(pullback)
        return y, residuals

    _, types = jax.eval_shape(flat)
    y, residuals = lax.cond(used, flat, lambda: (x, zeros_like_type(types)))
    return y, jax.tree.unflatten(structure, residuals)


def backward(pullback: Callable[[Any], tuple[Any, Any]], g: Any, used: Any, *, skips: bool):
    """Return the gradients of a layer's weights and input, or zeros and g.

    Args:     pullback: from `forward`, with its weights. g: gradient of the output. Others as in
              `result`.
    """
    if used is None:
        return pullback(g)
    if not skips:
        d_weights, d_x = pullback(g)
        zeros = jax.tree.map(jnp.zeros_like, d_weights)
        return select(used, d_weights, zeros), select(used, d_x, g)
    types, _ = jax.eval_shape(pullback, g)
    return lax.cond(used, lambda: pullback(g), lambda: (zeros_like_type(types), g))


def select(used: jax.Array, yes: Any, no: Any) -> Any:
    """Return the arrays of one of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(used, a, b), yes, no)
