"""Rotary position embeddings."""

import math

import jax
import jax.numpy as jnp

from jaxpar.config import ModelConfig, RopeScaling


def rope_frequencies(model: ModelConfig) -> jax.Array:
    """Compute the angle per position of each pair of dims, float32 [K/2].

    Source:   Su et al. 2021 (2104.09864), section 3.4.2.
    """
    pairs = jnp.arange(0, model.head_dim, 2, dtype=jnp.float32) / model.head_dim
    plain = 1.0 / (model.rope_theta**pairs)
    return plain if model.rope_scaling is None else _stretch(plain, model.rope_scaling)


def _stretch(frequencies: jax.Array, s: RopeScaling) -> jax.Array:
    """Apply Llama 3.1's scaling: divide low frequencies by `factor`, with a ramp to high ones."""
    turns = s.original_max_position * frequencies / (2 * math.pi)
    ramp = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = jnp.clip(ramp, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / s.factor)


@jax.named_scope("rope")
def rope_tables(positions: jax.Array, model: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Compute cosine and sine of every token's angles, float32 [B, T, 1, K/2] each."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(model)
    return jnp.cos(angles), jnp.sin(angles)


@jax.named_scope("rope")
def rope(x_BTHK: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair of dims of every head by the token's angles.

    Pairs are one dim from each half of the head, as in Hugging Face's weights, not interleaved as
    in the paper. The rotation flips the two halves instead of concatenating them.
    """
    cos, sin = (table[..., None, :] for table in tables)
    halves = x_BTHK.astype(jnp.float32).reshape(*x_BTHK.shape[:-1], 2, -1)
    sign = jnp.where(jnp.arange(2)[:, None] == 0, -1.0, 1.0)  # not a constant, which would be saved
    turned = halves * cos + jnp.flip(halves, axis=-2) * sign * sin
    return turned.reshape(x_BTHK.shape).astype(x_BTHK.dtype)
