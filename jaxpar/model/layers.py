"""The pieces of a block: norm, rotary embedding, projections, feed-forward, embedding lookup.

Pure functions of local shards. Shape letters as in `axes.py`; H, G, F, V are one tensor rank's
part, and T is what the device holds of the sequence.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.axes import TENSOR, VOCAB_AXES
from jaxpar.config import ModelConfig, RopeScaling
from jaxpar.kernels import float8
from jaxpar.kernels.measured import Measured
from jaxpar.kernels.norm import Normed, Unscaled, rms_norm, rms_norm_beside, rms_norm_unscaled
from jaxpar.kernels.swiglu import swiglu as swiglu_of_both
from jaxpar.kernels.swiglu import swiglu_measured
from jaxpar.model import lora
from jaxpar.parallel.float32_gradients import is_weight


@jax.named_scope("norm")
def norm(x: jax.Array, parameter: jax.Array, m: ModelConfig) -> jax.Array:
    """`rms_norm`, its gain being the parameter, or 1 more (`model.norm_offset`)."""
    return rms_norm(x, _gain(parameter, m), m.norm_eps)


@jax.named_scope("norm")
def norm_beside(x: jax.Array, parameter: jax.Array, m: ModelConfig) -> tuple[jax.Array, Normed]:
    """x, to be used from here on in its place, and `norm` of it: their backward is one."""
    return rms_norm_beside(x, _gain(parameter, m), m.norm_eps)


@jax.named_scope("norm")
def norm_unscaled(x: jax.Array, parameter: jax.Array, m: ModelConfig) -> tuple[jax.Array, Unscaled]:
    """`norm_beside`, the rows of the norm to be scaled behind the matmul."""
    return rms_norm_unscaled(x, _gain(parameter, m), m.norm_eps)


def _gain(parameter: jax.Array, m: ModelConfig) -> jax.Array:
    return parameter + 1.0 if m.norm_offset else parameter


def rope_frequencies(model: ModelConfig) -> jax.Array:
    """Angle per position of each pair of dims, float32 [K/2].

    Source:   Su et al. 2021 (2104.09864), section 3.4.2.
    """
    pairs = jnp.arange(0, model.head_dim, 2, dtype=jnp.float32) / model.head_dim
    plain = 1.0 / (model.rope_theta**pairs)
    return plain if model.rope_scaling is None else _stretch(plain, model.rope_scaling)


def _stretch(frequencies: jax.Array, s: RopeScaling) -> jax.Array:
    """Llama 3.1: slow frequencies divided by `factor`, fast ones kept, a ramp between."""
    turns = s.original_max_position * frequencies / (2 * math.pi)
    ramp = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = jnp.clip(ramp, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / s.factor)


@jax.named_scope("rope")
def rope_tables(positions: jax.Array, model: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every token's angles, float32 [B, T, 1, K/2] each."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(model)
    return jnp.cos(angles), jnp.sin(angles)


@jax.named_scope("rope")
def rope(x_BTHK: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the first half of each head's dims against the second, by the token's angles.

    Half-rotation, as in Hugging Face's weights, not interleaved as in the paper. Written with a
    flip of the two halves in place of a concatenation.
    """
    cos, sin = (table[..., None, :] for table in tables)
    halves = x_BTHK.astype(jnp.float32).reshape(*x_BTHK.shape[:-1], 2, -1)
    sign = jnp.where(jnp.arange(2)[:, None] == 0, -1.0, 1.0)  # no array: it would be saved
    turned = halves * cos + jnp.flip(halves, axis=-2) * sign * sin
    return turned.reshape(x_BTHK.shape).astype(x_BTHK.dtype)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y plus a float32 bias, if there is one; y's dtype out.

    Added in float32, so that the bias's gradient, a sum over all tokens, is a float32 sum.
    """
    return y if bias is None else (y.astype(jnp.float32) + bias).astype(y.dtype)


def matmul(
    x: jax.Array | Normed | Measured, weights: Sequence[Any], name: str, *, measured: bool = False
) -> list[Any]:
    """x times each weight: in the compute dtype, or in float8 if the weights are `float8.Weight`.
    Of a `float32_gradients.Weight`, the gradient is float32.

    Args:     x: unwritten, or measured, for float8 alone. name: remat name of x, and in float8 of
              the rounded x. measured: in float8 alone, the outputs are, for their gradients.
    """
    if isinstance(weights[0], float8.Weight):
        return float8.matmul(x, weights, name, measured=measured)
    return [_product(x, w.values, *w.gradients) if is_weight(w) else x @ w for w in weights]


@jax.custom_vjp
def _product(x, w, gradient):
    """x @ w. The gradient for w is that of `gradient`, float32."""
    return x @ w


def _product_forward(x, w, _):
    return x @ w, (x, w)


def _product_backward(saved, d_y):
    x, w = saved
    d_x = lax.dot_general(d_y, w, (((d_y.ndim - 1,), (1,)), ((), ())))
    tokens = tuple(range(x.ndim - 1))
    summed = (tokens, tokens), ((), ())
    d_w = lax.dot_general(x, d_y, summed, preferred_element_type=jnp.float32)
    return d_x, None, d_w


_product.defvjp(_product_forward, _product_backward)


@jax.named_scope("qkv")
def project_qkv(h_BTD: jax.Array | Normed | Unscaled, w: dict, model: ModelConfig):
    """Queries [B, T, H, K], keys and values [B, T, G, K]: one column-parallel matmul."""
    tensor = lax.axis_size(TENSOR)
    heads, kv_heads = model.num_heads // tensor, model.num_kv_heads // tensor
    values = h_BTD.values if isinstance(h_BTD, Unscaled) else h_BTD
    (qkv,) = matmul(values, [w["wqkv"]], "attn_norm")
    qkv = _one_gradient(add_bias(qkv, w.get("bqkv")))
    if isinstance(h_BTD, Unscaled):
        qkv = h_BTD.scaled(qkv)
    split = [heads * model.head_dim, (heads + kv_heads) * model.head_dim]
    parts = zip(jnp.split(qkv, split, axis=-1), ("wq", "wk", "wv"), strict=True)
    by_head = lambda x: x.reshape(*x.shape[:2], -1, model.head_dim)  # noqa: E731
    return [by_head(lora.add(x, values, w, name)) for x, name in parts]


@jax.custom_vjp
def _one_gradient(x: jax.Array) -> jax.Array:
    """x, whose gradient is put together once: two matmuls read it, and XLA would put it together
    for each, or first write RoPE's part of it for both."""
    return x


_one_gradient.defvjp(lambda x: (x, None), lambda _, g: (lax.optimization_barrier(g),))


@jax.named_scope("gate_up")
def gate_and_up(h_BTD: jax.Array | Normed, w: dict) -> tuple[jax.Array, jax.Array]:
    """Gate and up projections, [B, T, F] each: column-parallel.

    Two matmuls, where their weights are not one (`views.gate_and_up_are_one`).
    """
    gate, up = matmul(h_BTD, [w["w_gate"], w["w_up"]], "mlp_norm")
    gate, up = lora.add(gate, h_BTD, w, "w_gate"), lora.add(up, h_BTD, w, "w_up")
    return add_bias(gate, w.get("b_gate")), add_bias(up, w.get("b_up"))


@jax.named_scope("output")
def to_residual(x: jax.Array | Measured, w: dict, weight: str, name: str) -> jax.Array:
    """x times `wo` or `w_down`: row-parallel, this tensor rank's part of a sum, [B, T, D].

    Args:     name: remat name of x.
    """
    (y,) = matmul(x, [w[weight]], name)
    return lora.add(y, x, w, weight)


@jax.named_scope("gate_up")
def gate_beside_up(h_BTD: jax.Array | Normed, w: dict) -> jax.Array | Measured:
    """Both in one, [B, T, 2 F]: column-parallel, of weights side by side. Measured in float8, where
    `gated_in_one` finds its gradient's largest magnitude."""
    (gate_up,) = matmul(h_BTD, [w["w_gate_up"]], "mlp_norm", measured=True)
    return gate_up


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, [B, T, F].

    Source:   Shazeer 2020 (2002.05202), equation 5.
    """
    return jax.nn.silu(gate) * up


@jax.named_scope("activation")
def gated(gate: jax.Array, up: jax.Array, m: ModelConfig) -> jax.Array:
    """The feed-forward's hidden values, [B, T, F]: SwiGLU, or GeGLU (`model.activation`).

    Source:   Shazeer 2020 (2002.05202), equation 5.
    """
    return jax.nn.gelu(gate, approximate=True) * up if m.activation == "gelu" else swiglu(gate, up)


@jax.named_scope("activation")
def gated_in_one(
    gate_up_BT2F: jax.Array | Measured, scale_BT1: jax.Array | None = None
) -> jax.Array | Measured:
    """`gated` of what `gate_beside_up` makes: SwiGLU, [B, T, F]; measured, if that is.

    Args:     scale: of each row, where the matmul's input is yet to be scaled; float32, without a
              gradient. None: it is not.
    """
    if isinstance(gate_up_BT2F, Measured):
        assert scale_BT1 is None  # float8 rounds norms from their inputs, scaled
        return swiglu_measured(gate_up_BT2F)
    return swiglu_of_both(gate_up_BT2F, scale_BT1)


def vocab_shard_index() -> jax.Array:
    """Which shard of the vocabulary this device holds."""
    return lax.axis_index(VOCAB_AXES)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embedding_lookup(
    table_VD: jax.Array, tokens_BT: jax.Array, num_rows: int, dtype: Any
) -> jax.Array:
    """Rows of a vocabulary shard, cast to `dtype`; zeros for tokens that another shard holds.

    The gradient is added up in float32: a frequent token takes thousands of terms, which bfloat16
    would lose.

    Args:     table_VD: this device's rows. num_rows: V, static.
    Returns:  [B, T, D], to be summed over VOCAB_AXES.
    """
    local = tokens_BT - vocab_shard_index() * num_rows
    held = (local >= 0) & (local < num_rows)
    rows = table_VD[jnp.where(held, local, 0)].astype(dtype)
    return jnp.where(held[..., None], rows, jnp.zeros_like(rows))


def _lookup_forward(table_VD, tokens_BT, num_rows, dtype):
    rows = embedding_lookup(table_VD, tokens_BT, num_rows, dtype)
    return rows, (tokens_BT, jnp.zeros((), table_VD.dtype))


def _lookup_backward(num_rows, dtype, saved, d_rows):
    tokens_BT, like_table = saved
    local = tokens_BT - vocab_shard_index() * num_rows
    held = (local >= 0) & (local < num_rows)
    place = jnp.where(held, local, num_rows)  # past the end: dropped
    # A zero that waits for d_rows: XLA would make the table's zeros with the head's, at the loss.
    zero, d_rows = lax.optimization_barrier((jnp.float32(0), d_rows))
    zeros = jnp.broadcast_to(zero, (num_rows, d_rows.shape[-1]))
    d_table = zeros.at[place].add(d_rows.astype(jnp.float32), mode="drop")
    return d_table.astype(like_table.dtype), None


embedding_lookup.defvjp(_lookup_forward, _lookup_backward)
