"""The RMSNorms of a layer."""

import jax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.kernels.norm import NormOutput, rms_norm, rms_norm_beside, rms_norm_unscaled


@jax.named_scope("norm")
def norm(x: jax.Array, parameter: jax.Array, m: ModelConfig) -> jax.Array:
    """Apply `rms_norm`. The gain is the parameter, plus 1 if `model.norm_offset`."""
    return rms_norm(x, _gain(parameter, m), m.norm_eps)


@jax.named_scope("norm")
def norm_of_stream(
    x: jax.Array, parameter: jax.Array, ex: Execution
) -> tuple[jax.Array, NormOutput]:
    """Return x and its `norm`, in the form in which matmuls receive it (`Execution.norm`).

    Use the returned x from here on, so that one pass computes both gradients.
    """
    gain, eps = _gain(parameter, ex.cfg.model), ex.cfg.model.norm_eps
    if ex.norm == "deferred_scale":
        return rms_norm_unscaled(x, gain, eps)
    x, h = rms_norm_beside(x, gain, eps)
    return x, NormOutput(h if ex.norm == "in_quantizer" else h.written())


def _gain(parameter: jax.Array, m: ModelConfig) -> jax.Array:
    return parameter + 1.0 if m.norm_offset else parameter
