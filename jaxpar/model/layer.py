"""One layer of the decoder: x + attention(norm(x)), then x + feed_forward(norm(x)).

Shape letters as in `sharding/axes.py`; B is a device's rows. How a config is executed
(`execution/decisions.py`) shows in what values are, not here: `Shards` of the sequence, the
`NormOutput` in them, weights that know how to multiply.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import attention, feed_forward, linear, lora, moe
from jaxpar.model import norm as model_norm
from jaxpar.model.attention_context import AttentionContext
from jaxpar.parallel.tensor.shards import Shards

type Weights = dict[str, Any]


def layer(x: jax.Array, w: Weights, context: AttentionContext, ex: Execution) -> jax.Array:
    """The residual stream through one layer, on the local shard.

    Args:     x: [B, T/(sequence*tensor), D]. w: the layer's, whole over FSDP_AXES.
    Returns:  the same shape.
    Communication: that of each branch's `receive` and `send`, and the same in the backward.
    """
    for branch in branches(ex.cfg.model):
        with jax.named_scope(branch.name):
            own = branch.own(w)
            x, h = branch.enter(x, own, ex)
            out = branch.compute(h, own, context, ex)
            x = branch.leave(x, out, own, ex)
    return x


def gathered(h: NormOutput, w: Weights, name: str, ex: Execution) -> Shards:
    """What dense branches `receive`: a norm's output, gathered over TENSOR."""
    if ex.norm == "in_quantizer":  # not written; what is rounded there goes by the norm's name
        return Shards((h,))
    shards = Shards.gather(h.operand, in_shards=ex.collective_matmul)
    return shards.each(lambda part: dataclasses.replace(h, operand=named(part, name)))


@dataclass(frozen=True)
class Branch:
    """What a layer adds to the residual stream: a function of the stream's norm.

    In three steps, so that they can be scheduled otherwise than one after the other: in groups of
    rows, one's `enter` and `leave` lie beside another's `compute` (`row_groups.py`).
    """

    name: str
    norm: str
    compute: Callable[[Any, Weights, AttentionContext, Execution], Any]
    """What was received -> what is sent. No communication over TENSOR."""
    bias: str
    post_norm: str
    saved_as: str | None = None
    """Remat name of the stream behind it."""
    weights: tuple[str, ...] = ()
    """Its other weights; adapters go with their matrices."""
    receive: Callable[[NormOutput, Weights, str, Execution], Any] = gathered
    """The norm's output of this device's tokens -> that of the tokens it computes with."""
    send: Callable[[Any], jax.Array] = Shards.reduce_scatter
    """What was made of these -> the sum for this device's tokens."""

    def own(self, w: Weights) -> Weights:
        """Of a layer's weights those of this branch: no other meets them."""
        names = {self.norm, self.bias, self.post_norm, *self.weights}
        return {name: a for name, a in w.items() if lora.matrix_of(name) in names}

    def enter(self, x: jax.Array, w: Weights, ex: Execution) -> tuple[jax.Array, Any]:
        """x, to go on with in its place (the backward of both is one pass), and its norm."""
        x, h = model_norm.norm_of_stream(x, w[self.norm], ex)
        return x, self.receive(h, w, self.norm, ex)

    def leave(self, x: jax.Array, out: Any, w: Weights, ex: Execution) -> jax.Array:
        """x, and what the branch adds."""
        x = self.add(x, self.send(out), w, ex.cfg.model)
        return named(x, self.saved_as) if self.saved_as else x

    def add(self, x: jax.Array, out: jax.Array, w: Weights, m: ModelConfig) -> jax.Array:
        out = linear.add_bias(out, w.get(self.bias))
        return x + (model_norm.norm(out, w[self.post_norm], m) if m.post_norms else _alone(out))


@jax.custom_vjp
def _alone(out: jax.Array) -> jax.Array:
    """A matmul's result, added to x by what comes next, the norm of the sum, in the pass that reads
    it. XLA would have the matmul add it, in x's place, and so copy x first, for the backward."""
    return lax.optimization_barrier(out)


_alone.defvjp(lambda out: (_alone(out), None), lambda _, g: (g,))


ATTENTION = Branch(
    "attention",
    norm="attn_norm",
    compute=attention.heads,
    weights=attention.WEIGHTS,
    bias="bo",
    post_norm="attn_post_norm",
    saved_as="attn_residual",
)
FEED_FORWARD = Branch(
    "feed_forward",
    norm="mlp_norm",
    compute=feed_forward.glu,
    weights=feed_forward.WEIGHTS,
    bias="b_down",
    post_norm="mlp_post_norm",
)
EXPERTS = dataclasses.replace(FEED_FORWARD, compute=moe.mixture, weights=moe.WEIGHTS)


def branches(m: ModelConfig) -> tuple[Branch, ...]:
    """What a layer of this model adds to the residual stream, in order."""
    return ATTENTION, EXPERTS if m.num_experts else FEED_FORWARD
