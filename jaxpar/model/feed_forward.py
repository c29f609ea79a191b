"""Dense feed-forwards: `Glu` and `Mlp`. F counts one tensor rank's hidden units."""

from typing import Any

import jax

from jaxpar.components.feed_forward import ClampedSwiglu, Glu, Mlp
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels import glu as kernels
from jaxpar.kernels.float8.rounding import WithAmax
from jaxpar.kernels.glu import Activation, activated
from jaxpar.kernels.norm import NormOutput
from jaxpar.kernels.swiglu import swiglu
from jaxpar.model import lora
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.layer import Computation, of_whole
from jaxpar.model.linear import add_bias, products, row_parallel
from jaxpar.parallel.tensor.shards import Shards

type Weights = dict[str, Any]


def glu(h: Shards, w: Weights, context: AttentionContext, _: Execution) -> Shards:
    """Apply the GLU to each shard of the sequence. The result is this tensor rank's partial sum."""
    return h.map(_of_shard, w, component(context, Glu))


def _of_shard(h: NormOutput, w: Weights, of: Glu) -> jax.Array:
    halves = [named(y, "gate_up") for y in gate_up(h, w)]
    hidden = named(activation(halves, h, of), "mlp_hidden")
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
def activation(halves: list[Any], h: NormOutput, of: Glu) -> jax.Array | WithAmax:
    """Compute the hidden values, [B, T, F], from the result of `gate_up`.

    Source:   Shazeer 2020 (2002.05202), equation 5.
    """
    if len(halves) == 1:
        return swiglu(halves[0], h.scale)  # scales rows as it reads them
    gate, up = map(h.scaled, halves)
    return kernel_of(of).hidden(gate, up)


def mlp(h: Shards, w: Weights, context: AttentionContext, _: Execution) -> Shards:
    """Compute act(h w_up + b_up) w_down for each shard of the sequence.

    The result is this tensor rank's partial sum.

    Source:   Vaswani et al. 2017 (1706.03762), section 3.3; Brown et al. 2020 (2005.14165): GELU.
    """
    return h.map(_of_shard_without_gate, w, component(context, Mlp))


def _of_shard_without_gate(h: NormOutput, w: Weights, of: Mlp) -> jax.Array:
    with jax.named_scope("gate_up"):
        (up,) = products(h.operand, [w["w_up"]], "mlp_norm")
        up = add_bias(lora.add(up, h.operand, w, "w_up"), w.get("b_up"))
    up = named(up, "gate_up")
    with jax.named_scope("activation"):
        hidden = hidden_of(of, up)
    return row_parallel(named(hidden, "mlp_hidden"), w, "w_down", "mlp_hidden")


def hidden_of(of: Glu, *into: jax.Array) -> jax.Array:
    """Compute hidden values of gate and up, or in an `Mlp` of up alone."""
    if not isinstance(of, Mlp):
        return kernel_of(of).hidden(*into)
    (up,) = into
    return activated(up, plain_activation(of))


def plain_activation(of: Mlp) -> Activation:
    """Return the activation of a feed-forward without a gate."""
    assert not isinstance(of.activation, ClampedSwiglu)  # `config/rules/model.py`
    return of.activation


def kernel_of(of: Glu) -> kernels.GluKernel:
    """Return the kernel of a gated linear unit's activation."""
    if isinstance(of.activation, ClampedSwiglu):
        return kernels.ClampedSwiGLU(of.activation.limit, of.activation.alpha)
    return kernels.GeGLU() if of.activation == "gelu" else kernels.SwiGLU()


GLU = Computation("feed_forward", glu, of_whole(glu))
MLP = Computation("feed_forward", mlp, of_whole(mlp))
