"""What several plain forms compute: products with adapters, norms and activations."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.components.feed_forward import ClampedSwiglu
from jaxpar.components.model import Model

type Weights = dict[str, Any]


def times(x, w: Weights, name: str, dims: int = 1) -> jax.Array:
    """Compute x times a matrix, plus x times the product of its adapter's two if it has one.

    Args:     dims: last dims of x that are the matrix's inputs.
    """
    y = jnp.tensordot(x, w[name], dims)
    if name + "_lora_a" not in w:
        return y
    a, b = w[name + "_lora_a"], w[name + "_lora_b"]
    return y + jnp.tensordot(jnp.tensordot(x, a, dims), b, 1)


def unit_rms(x, eps: float) -> jax.Array:
    """Divide by the root mean square over the last dim."""
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


def norm(x, gain, model: Model, eps: float | None = None) -> jax.Array:
    """Apply RMSNorm over the last dim.

    Args:     eps: in place of that of the model's norms.
    """
    unit = unit_rms(x, model.norm.eps if eps is None else eps)
    return unit * (1 + gain) if model.norm.offset else unit * gain


def norm_of_stream(x, w: Weights, name: str, model: Model) -> jax.Array:
    """Apply the norm of the residual stream that has a name: RMSNorm, or LayerNorm."""
    if model.norm.kind == "rms":
        return norm(x, w[name], model)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return unit_rms(x, model.norm.eps) * w[name] + w[name + "_bias"]


def softcapped(x, cap: float | None) -> jax.Array:
    """Cap the magnitude of x smoothly."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def hidden(activation: str | ClampedSwiglu, up, gate=None) -> jax.Array:
    """Compute the hidden values of a feed-forward.

    Args:     gate: None in a feed-forward of two matrices.
    """
    if isinstance(activation, ClampedSwiglu):
        gate, limit = jnp.clip(gate, None, activation.limit), activation.limit
        return gate * jax.nn.sigmoid(activation.alpha * gate) * (jnp.clip(up, -limit, limit) + 1)
    return _activated(up, activation) if gate is None else _activated(gate, activation) * up


def _activated(x, kind: str) -> jax.Array:
    if kind == "silu":
        return x * jax.nn.sigmoid(x)
    if kind == "relu_squared":
        return jnp.where(x > 0, x**2, 0)
    if kind == "gelu_exact":
        return 0.5 * x * (1 + jax.scipy.special.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
