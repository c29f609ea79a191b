"""A feed-forward of two matrices, without a gate, as a branch of a layer.

Source:   Vaswani et al. 2017 (1706.03762), section 3.3; Brown et al. 2020 (2005.14165): GELU.
"""

from typing import Any

import jax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import lora
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.feed_forward import hidden_of
from jaxpar.model.linear import add_bias, products, row_parallel
from jaxpar.parallel.tensor.shards import Shards

type Weights = dict[str, Any]

#: Names in the fused weight layout.
WEIGHTS = ("w_up", "b_up", "w_down")


def two_matrices(h: Shards, w: Weights, _: AttentionContext, ex: Execution) -> Shards:
    """Compute act(h w_up + b_up) w_down for each shard of the sequence.

    The result is this tensor rank's partial sum.
    """
    return h.map(_of_shard, w, ex.cfg.model)


def _of_shard(h: NormOutput, w: Weights, m: ModelConfig) -> jax.Array:
    with jax.named_scope("gate_up"):
        (up,) = products(h.operand, [w["w_up"]], "mlp_norm")
        up = add_bias(lora.add(up, h.operand, w, "w_up"), w.get("b_up"))
    hidden = named(activation(named(up, "gate_up"), m), "mlp_hidden")
    return row_parallel(hidden, w, "w_down", "mlp_hidden")


@jax.named_scope("activation")
def activation(x: jax.Array, m: ModelConfig) -> jax.Array:
    """Apply `model.activation`."""
    return hidden_of(m, x)
