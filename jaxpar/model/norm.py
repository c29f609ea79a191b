"""The norms of a layer: RMSNorms, or LayerNorms."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Model
from jaxpar.execution.decisions import Execution
from jaxpar.kernels.norm import NormOutput, layer_norm, rms_norm, rms_norm_beside, rms_norm_unscaled
from jaxpar.parallel.collectives import psum
from jaxpar.sharding.axes import TENSOR


@jax.named_scope("norm")
def norm(x: jax.Array, parameter: jax.Array, m: Model) -> jax.Array:
    """Apply `rms_norm`. The gain is the parameter, plus 1 if `model.norm.offset`."""
    return rms_norm(x, _gain(parameter, m), m.norm.eps)


def named_norm(x: jax.Array, w: dict[str, jax.Array], name: str, m: Model) -> jax.Array:
    """Apply the norm of a residual stream that is a parameter's name: `norm`, or LayerNorm."""
    if m.norm.kind == "layer":
        return layer_norm(x, w[name], w[f"{name}_bias"], m.norm.eps)
    return norm(x, w[name], m)


@jax.named_scope("norm")
def norm_of_stream(
    x: jax.Array, w: dict[str, jax.Array], name: str, ex: Execution
) -> tuple[jax.Array, NormOutput]:
    """Return x and its `named_norm`, in the form in which matmuls receive it (`Execution.norm`).

    Use the returned x from here on, so that one pass computes both gradients.
    """
    if ex.cfg.model.norm.kind == "layer":
        return x, NormOutput(named_norm(x, w, name, ex.cfg.model))
    gain, eps = _gain(w[name], ex.cfg.model), ex.cfg.model.norm.eps
    if ex.norm == "deferred_scale":
        return rms_norm_unscaled(x, gain, eps)
    x, h = rms_norm_beside(x, gain, eps)
    return x, NormOutput(h if ex.norm == "in_quantizer" else h.written())


@jax.named_scope("norm")
def norm_over_heads(x: jax.Array, parameter: jax.Array, m: Model) -> jax.Array:
    """Apply RMSNorm over all heads of a token, in float32. Returns x's dtype.

    Args:     x: [B, T, heads, K], this tensor rank's heads. parameter: float32 [heads, K].
    Communication: all-reduce over TENSOR of one float32 per token, and one in the backward.
    Source:   Muennighoff et al. 2024 (2409.02060), OLMoE, section 4.2.
    """
    wide, count = x.astype(jnp.float32), x[0, 0].size * lax.axis_size(TENSOR)
    squares = psum(jnp.sum(wide**2, axis=(-2, -1), keepdims=True), TENSOR)
    scale = lax.rsqrt(squares / count + m.norm.eps)
    return (wide * scale * _gain(parameter, m)).astype(x.dtype)


@jax.named_scope("norm")
def rms_normalize(x: jax.Array, m: Model) -> jax.Array:
    """Apply RMSNorm without a gain, in float32. Returns x's dtype."""
    wide = x.astype(jnp.float32)
    squares = jnp.mean(wide**2, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(squares + m.norm.eps)).astype(x.dtype)


def _gain(parameter: jax.Array, m: Model) -> jax.Array:
    return parameter + 1.0 if m.norm.offset else parameter
