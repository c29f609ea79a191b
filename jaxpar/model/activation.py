"""Gated activations."""

import jax

from jaxpar.config import ModelConfig
from jaxpar.kernels.float8.amax import Measured
from jaxpar.kernels.swiglu import swiglu as swiglu_of_both
from jaxpar.kernels.swiglu import swiglu_measured


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
