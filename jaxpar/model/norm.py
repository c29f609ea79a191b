"""The norms of a layer."""

import jax

from jaxpar.config import ModelConfig
from jaxpar.kernels.norm import Normed, Unscaled, rms_norm, rms_norm_beside, rms_norm_unscaled


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
