"""The parts of the GPT-3 block in plain jax.numpy, for `model/reference.py`."""

import math

import jax
import jax.numpy as jnp


def layer_norm(x, gain, bias, eps: float) -> jax.Array:
    """Apply LayerNorm over the last dim."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * gain + bias


def activated(x, kind: str) -> jax.Array:
    """Apply `model.activation`."""
    if kind == "silu":
        return x * jax.nn.sigmoid(x)
    if kind == "relu_squared":
        return jnp.where(x > 0, x**2, 0)
    if kind == "gelu_exact":
        return 0.5 * x * (1 + jax.scipy.special.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
