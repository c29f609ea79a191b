"""One layer of the decoder: x + attention(norm(x)), then x + feed_forward(norm(x)).

Each term is a `Branch`: normalize, receive, compute, send. How a config is executed shows in the
values that pass through, not in these lines: `Shards` of the sequence, the `NormOutput` in them,
weights that know how to multiply. Shape letters as in `sharding/axes.py`; B is a device's rows.
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
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.norm import norm, norm_of_stream
from jaxpar.parallel.tensor.shards import Shards

type Weights = dict[str, Any]


def layer(x: jax.Array, w: Weights, context: AttentionContext, ex: Execution) -> jax.Array:
    """The residual stream through one layer, on the local shard.

    Args:     x: [B, T/(sequence*tensor), D]. w: the layer's weights, complete over FSDP_AXES.
    Returns:  like x.
    Communication: that of each branch's `receive` and `send`, and the same in the backward.
    """
    for branch, vectors, matrices in branches_with_weights(w, ex.cfg.model):
        with jax.named_scope(branch.name):
            x, h = branch.normalize(x, vectors, ex)
            h = branch.receive(h, matrices, branch.norm, ex)
            out = branch.compute(h, matrices, context, ex)
            x = branch.add(x, branch.send(out), vectors, ex.cfg.model)
    return x


def gathered(h: NormOutput, _: Weights, name: str, ex: Execution) -> Shards:
    """What dense branches `receive`: a norm's output, gathered over TENSOR.

    Args:     name: remat name of what is gathered.
    """
    if ex.norm == "in_quantizer":  # never written; the quantizer names what it rounds
        return Shards((h,))
    shards = Shards.gather(h.operand, in_shards=ex.collective_matmul)
    return shards.each(lambda part: dataclasses.replace(h, operand=named(part, name)))


@dataclass(frozen=True)
class Branch:
    """One term of the residual stream, as a function of the stream's norm.

    Its steps are separate functions so that they can be scheduled otherwise: with row groups, the
    `receive` and `send` of one group overlap the `compute` of another (`row_groups.py`).
    """

    name: str
    norm: str
    compute: Callable[[Any, Weights, AttentionContext, Execution], Any]
    """What was received -> what is sent. No communication over TENSOR."""
    bias: str
    post_norm: str
    saved_as: str | None = None
    """Remat name of the stream after it."""
    weights: tuple[str, ...] = ()
    """Names of the weights that `receive` and `compute` use, without adapters."""
    receive: Callable[[NormOutput, Weights, str, Execution], Any] = gathered
    """The norm's output for this device's tokens -> that for the tokens it computes with."""
    send: Callable[[Any], jax.Array] = Shards.reduce_scatter
    """What was computed of these -> the sum for this device's tokens."""

    def split(self, w: Weights) -> tuple[Weights, Weights]:
        """Of a layer's weights, this branch's: (norms and bias, matrices with their adapters)."""
        around = {self.norm, self.bias, self.post_norm}
        vectors = {name: a for name, a in w.items() if name in around}
        matrices = {name: a for name, a in w.items() if lora.matrix_of(name) in self.weights}
        return vectors, matrices

    def normalize(
        self, x: jax.Array, vectors: Weights, ex: Execution
    ) -> tuple[jax.Array, NormOutput]:
        """x, to be used in its place (one pass computes the backward of both), and its norm."""
        return norm_of_stream(x, vectors[self.norm], ex)

    def add(self, x: jax.Array, out: jax.Array, vectors: Weights, m: ModelConfig) -> jax.Array:
        """x plus the branch's output with its bias, or the norm of that (`model.post_norms`)."""
        out = linear.add_bias(out, vectors.get(self.bias))
        x = x + (norm(out, vectors[self.post_norm], m) if m.post_norms else _added_by_norm(out))
        return named(x, self.saved_as) if self.saved_as else x


@jax.custom_vjp
def _added_by_norm(out: jax.Array) -> jax.Array:
    """A matmul's result, which the next norm adds to the stream in the pass that reads both.

    XLA would have the matmul add to x in place, and so copy x first for the backward."""
    return lax.optimization_barrier(out)


_added_by_norm.defvjp(lambda out: (_added_by_norm(out), None), lambda _, g: (g,))


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
    """The branches of a layer of this model, in order."""
    return ATTENTION, EXPERTS if m.num_experts else FEED_FORWARD


def branches_with_weights(w: Weights, m: ModelConfig) -> list[tuple[Branch, Weights, Weights]]:
    """Each branch with its vectors and matrices (`Branch.split`).

    Raises:   ValueError for a weight that no branch names, which would silently have no effect.
    """
    found = [(branch, *branch.split(w)) for branch in branches(m)]
    unused = set(w).difference(*(own for _, *parts in found for own in parts))
    if unused:
        raise ValueError(f"no branch of the layer uses {sorted(unused)}: name them in its WEIGHTS")
    return found
