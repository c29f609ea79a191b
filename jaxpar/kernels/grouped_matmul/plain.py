"""The activation of experts without a gate. XLA compiles both directions.

R rows   F width
"""

import functools

import jax
import jax.numpy as jnp

from jaxpar.kernels.activation import Activation, activated

f32 = jnp.float32


def plain_hidden(kind: Activation, up: jax.Array, scale: jax.Array) -> jax.Array:
    """Compute act(up) times scale.

    Args:     up: [R, F]. scale: float32 [R].
    Returns:  [R, F] in up's dtype.
    """
    return (activated(up.astype(f32), kind) * scale[:, None]).astype(up.dtype)


def plain_backward(
    kind: Activation, up: jax.Array, d_hidden: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the hidden values again, times scale, and the gradients of their factors.

    Args:     d_hidden: [R, F], gradient of the scaled hidden values. Others as `plain_hidden`.
    Returns:  (hidden, gradient of up: [R, F] in up's dtype; of scale: float32 [R]).
    """
    act, pullback = jax.vjp(functools.partial(activated, kind=kind), up.astype(f32))
    d, by_row = d_hidden.astype(f32), scale[:, None]
    (d_up,) = pullback(d * by_row)
    return (act * by_row).astype(up.dtype), d_up.astype(up.dtype), jnp.sum(act * d, axis=1)
