"""Rotary position embeddings, and their scaling to longer contexts."""

import math

import jax
import jax.numpy as jnp

from jaxpar.components.attention import QueryGrowth
from jaxpar.components.rope import Rope, RopeScaling

#: Cosine and sine of every token's angles, float32 [B, T, 1, R/2] each; R dims are rotated.
type Tables = tuple[jax.Array, jax.Array]


def rope_frequencies(rope: Rope, dims: int, length: int | jax.Array = 1) -> jax.Array:
    """Compute the angle per position of each pair of dims, float32 [R/2].

    Args:     dims: R, of each head. length: tokens of the longest sequence, which decides
              LongRoPE's divisors, or those of each row, int32 [B]: the result is then
              [B, 1, 1, R/2].
    Source:   Su et al. 2021 (2104.09864), section 3.4.2.
    """
    pairs = jnp.arange(0, dims, 2, dtype=jnp.float32) / dims
    plain = 1.0 / (rope.theta**pairs)
    match rope.scaling:
        case None:
            return plain
        case RopeScaling(kind="llama3") as s:
            return _stretch(plain, s)
        case RopeScaling(kind="linear") as s:
            return plain / s.factor
        case RopeScaling(kind="proportional") as s:
            return _proportional(plain, s)
        case RopeScaling(kind="yarn") as s:
            return _yarn(plain, s, rope.theta)
        case s if isinstance(length, int):
            return plain / jnp.asarray(_divisors(s, length), jnp.float32)
        case s:
            short, long = s.original_max_position, s.original_max_position + 1
            divisors = jnp.asarray([_divisors(s, n) for n in (short, long)], jnp.float32)
            return plain / divisors[(length > short).astype(jnp.int32)][:, None, None]


def _divisors(s: RopeScaling, length: int) -> tuple[float, ...]:
    """Return LongRoPE's divisor of each pair's frequency for sequences of `length` tokens."""
    return s.long_factors if length > s.original_max_position else s.short_factors


def _stretch(frequencies: jax.Array, s: RopeScaling) -> jax.Array:
    """Apply Llama 3.1's scaling: divide low frequencies by `factor`, with a ramp to high ones."""
    turns = s.original_max_position * frequencies / (2 * math.pi)
    if s.low_freq_factor == s.high_freq_factor:
        return jnp.where(turns > s.low_freq_factor, frequencies, frequencies / s.factor)
    ramp = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = jnp.clip(ramp, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / s.factor)


def _proportional(frequencies: jax.Array, s: RopeScaling) -> jax.Array:
    """Divide all frequencies by `factor`, and let only the first pairs turn.

    The angles are those of all dims: the pairs that turn are no narrower rotary embedding.
    """
    pairs = len(frequencies)
    return jnp.where(jnp.arange(pairs) < int(s.turning * pairs), frequencies / s.factor, 0.0)


def _yarn(frequencies: jax.Array, s: RopeScaling, theta: float) -> jax.Array:
    """Divide the frequencies of late dims by `factor`, with a ramp over dims to early ones.

    Source:   Peng et al. 2023 (2309.00071), section 3.2.
    """

    def dim_with(turns: float) -> float:
        """Return the dim, as a fraction, that turns so often in the original context."""
        wavelength = s.original_max_position / turns
        return R * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    R = 2 * len(frequencies)
    first, last = dim_with(s.beta_fast), dim_with(s.beta_slow)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    steps = (jnp.arange(R // 2, dtype=jnp.float32) - first) / ((last - first) or 1e-3)
    ramp = jnp.clip(steps, 0.0, 1.0)
    return frequencies * (1 - ramp + ramp / s.factor)


def attention_factor(s: RopeScaling | None) -> float:
    """Return the factor of cosine and sine; its square multiplies the scores of rotated dims.

    Source:   YaRN (2309.00071), section 3.4; LongRoPE (2402.13753), as published with Phi-3.
    """
    if s is None or s.kind in ("llama3", "linear", "proportional"):
        return 1.0
    if s.attention_factor is not None:
        return s.attention_factor
    if s.kind == "yarn":
        return 0.1 * math.log(s.factor) + 1
    return math.sqrt(1 + math.log(s.factor) / math.log(s.original_max_position))


def score_factor(s: RopeScaling | None) -> float:
    """Return the factor of all attention scores, beyond 1 / sqrt(head_dim).

    Source:   DeepSeek-AI 2024 (2405.04434), section 3.1.4, and their code.
    """
    if s is None or not s.mscale_all_dim:
        return 1.0
    return (0.1 * s.mscale_all_dim * math.log(s.factor) + 1) ** 2


@jax.named_scope("rope")
def rope_tables(positions: jax.Array, rope: Rope, dims: int, length: int | jax.Array = 1) -> Tables:
    """Compute cosine and sine of every token's angles, float32 [B, T, 1, R/2] each.

    Args:     positions: int32 [B, T]. dims, length: as in `rope_frequencies`.
    """
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(rope, dims, length)
    tables = jnp.cos(angles), jnp.sin(angles)
    factor = attention_factor(rope.scaling)
    return tables if factor == 1 else (tables[0] * factor, tables[1] * factor)


def query_scale(positions: jax.Array, rope: Rope) -> jax.Array | None:
    """Compute the factor of every token's queries, float32 [B, T, 1, 1]; None if it is 1.

    Args:     positions: int32 [B, T].
    Source:   Nakanishi 2025 (2501.19399), as published with Ministral 3.
    """
    s = rope.scaling
    if s is None or s.query_beta == 0:
        return None
    turns = (positions // s.original_max_position).astype(jnp.float32)
    return (1 + s.query_beta * jnp.log1p(turns))[..., None, None]


def query_growth(positions: jax.Array, growth: QueryGrowth) -> jax.Array:
    """Compute the factor of every token's queries in layers without a rotary embedding.

    It grows one position earlier than `query_scale`.

    Source:   Nakanishi 2025 (2501.19399), as published with Llama 4.
    """
    turns = ((positions + 1) // growth.span).astype(jnp.float32)
    return (1 + growth.beta * jnp.log1p(turns))[..., None, None]


@jax.named_scope("rope")
def rope(x_BTHK: jax.Array, tables: Tables, layout: str = "halves") -> jax.Array:
    """Rotate pairs of the first R dims of every head by the token's angles.

    A pair is one dim from each half of the R dims, as in Hugging Face's weights, or, in the layout
    "interleaved", two neighbors, as in the paper. The rotation flips the two members of all pairs
    instead of concatenating them.
    """
    R = 2 * tables[0].shape[-1]
    if x_BTHK.shape[-1] == R:
        return _rotate(x_BTHK, tables, layout)
    return jnp.concatenate((_rotate(x_BTHK[..., :R], tables, layout), x_BTHK[..., R:]), axis=-1)


def _rotate(x: jax.Array, tables: Tables, layout: str) -> jax.Array:
    halves = layout == "halves"
    members, shape = (-2, (2, -1)) if halves else (-1, (-1, 2))
    cos, sin = (table[..., None, :] if halves else table[..., None] for table in tables)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], *shape)
    member = jnp.arange(2)[:, None] if halves else jnp.arange(2)
    sign = jnp.where(member == 0, -1.0, 1.0)  # not a constant, which would be saved
    turned = pairs * cos + jnp.flip(pairs, axis=members) * sign * sin
    return turned.reshape(x.shape).astype(x.dtype)
