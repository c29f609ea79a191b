"""The pieces of a block: norm, rotary embedding, projections, feed-forward, embedding lookup.

Pure functions of local shards. Shape letters as in `sharding/axes.py`; H, G, F, V are one tensor
rank's part, and T is what the device holds of the sequence.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig
from jaxpar.kernels import float8
from jaxpar.kernels.float8.amax import Measured
from jaxpar.kernels.norm import Normed, Unscaled
from jaxpar.model import lora
from jaxpar.parallel.gradient_buffers import is_weight
from jaxpar.sharding.axes import TENSOR


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

    Two matmuls, where their weights are not one (`decisions.gate_and_up_are_one`).
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
