"""A gated linear unit (GLU), as a branch of a layer. F counts one tensor rank's hidden units."""

from typing import Any

import jax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.activation import Activation, activated
from jaxpar.kernels.float8.amax import WithAmax
from jaxpar.kernels.glu import ClampedSwiGLU, GeGLU, Glu, SwiGLU
from jaxpar.kernels.norm import NormOutput
from jaxpar.kernels.swiglu import swiglu
from jaxpar.model import lora
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.linear import add_bias, products, row_parallel
from jaxpar.parallel.tensor.shards import Shards

type Weights = dict[str, Any]

#: Names in the fused weight layout.
WEIGHTS = ("w_gate_up", "w_gate", "b_gate", "w_up", "b_up", "w_down")


def glu(h: Shards, w: Weights, _: AttentionContext, ex: Execution) -> Shards:
    """Apply the GLU to each shard of the sequence. The result is this tensor rank's partial sum."""
    return h.map(_of_shard, w, ex.cfg.model)


def _of_shard(h: NormOutput, w: Weights, m: ModelConfig) -> jax.Array:
    halves = [named(y, "gate_up") for y in gate_up(h, w)]
    hidden = named(activation(halves, h, m), "mlp_hidden")
    return row_parallel(hidden, w, "w_down", "mlp_hidden")


@jax.named_scope("gate_up")
def gate_up(h: NormOutput, w: Weights) -> list[Any]:
    """Compute the gate and up projections: [B, T, 2 F] with fused weights, else [B, T, F] each.

    In float8, the fused projection is a `WithAmax`, so that its gradient is one too."""
    if "w_gate_up" in w:
        return products(h.operand, [w["w_gate_up"]], "mlp_norm", with_amax=True)
    gate, up = products(h.operand, [w["w_gate"], w["w_up"]], "mlp_norm")
    gate, up = lora.add(gate, h.operand, w, "w_gate"), lora.add(up, h.operand, w, "w_up")
    return [add_bias(gate, w.get("b_gate")), add_bias(up, w.get("b_up"))]


@jax.named_scope("activation")
def activation(halves: list[Any], h: NormOutput, m: ModelConfig) -> jax.Array | WithAmax:
    """Compute the hidden values, [B, T, F], from the result of `gate_up`.

    Source:   Shazeer 2020 (2002.05202), equation 5.
    """
    if len(halves) == 1:
        return swiglu(halves[0], h.scale)  # scales rows as it reads them
    gate, up = map(h.scaled, halves)
    return glu_of(m).hidden(gate, up)


def hidden_of(m: ModelConfig, *into: jax.Array) -> jax.Array:
    """Compute hidden values of gate and up, or without `model.mlp_gate` of up alone."""
    if m.mlp_gate:
        return glu_of(m).hidden(*into)
    (up,) = into
    return activated(up, plain_activation(m))


def plain_activation(m: ModelConfig) -> Activation:
    """Return the activation of a feed-forward without a gate."""
    assert m.activation != "clamped_swiglu"  # `config/rules/model.py`
    return m.activation


def glu_of(m: ModelConfig) -> Glu:
    """Return the gated linear unit of `model.activation`."""
    if m.activation == "clamped_swiglu":
        return ClampedSwiGLU(m.swiglu_limit, m.swiglu_alpha)
    return GeGLU() if m.activation == "gelu" else SwiGLU()
