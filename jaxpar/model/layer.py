"""One layer of the decoder: x + attention(norm(x)), then x + feed_forward(norm(x)).

Each term is a `Branch` with the steps normalize, receive, compute and send. Experts also dispatch
tokens before they compute, and collect them afterwards. This code is the same for every
`Execution`. Differences are in the types of the values: `Shards` of the sequence, whose parts are
`NormOutput`s, and weights that implement their own matmul. Shape letters are those of
`sharding/axes.py`; B counts a device's rows.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import ModelConfig
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import attention, feed_forward, linear, lora, probes
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.gpt import feed_forward as gpt_feed_forward
from jaxpar.model.latent_attention import heads as latent_attention
from jaxpar.model.moe import experts
from jaxpar.model.norm import norm, norm_of_stream
from jaxpar.model.recurrent import delta_net, kimi_delta, mamba
from jaxpar.parallel.tensor.shards import Shards

type Weights = dict[str, Any]


def layer(x: jax.Array, w: Weights, context: AttentionContext, ex: Execution) -> jax.Array:
    """Apply one layer to the local shard of the residual stream.

    Args:     x: [B, T/(sequence*tensor), D]. w: the layer's weights, complete over FSDP_AXES.
    Returns:  like x.
    Communication: that of each branch's `receive` and `send`, and the same in the backward.
    """
    for branch, vectors, matrices in branches_with_weights(w):
        with jax.named_scope(branch.name):
            x, h = branch.normalize(x, vectors, ex)
            x = probes.observe(branch.input_point, x, w, context, ex.cfg, seen=h.whole)
            h = branch.receive(h, matrices, branch.norm, ex)
            out = branch.function(h, matrices, context, ex)
            out = branch.normalized(branch.send(out), vectors, ex.cfg.model)
            out = probes.observe(branch.output_point, out, w, context, ex.cfg)
            x = branch.add(x, out, vectors, ex.cfg.model)
    return probes.observe("layer", x, w, context, ex.cfg)


def gathered(h: NormOutput, _: Weights, name: str, ex: Execution) -> Shards:
    """Gather a norm's output over TENSOR: the `receive` of dense branches.

    Args:     name: remat name of the gathered value.
    """
    if ex.norm == "in_quantizer":  # unmaterialized; the quantizer names the rounded values
        return Shards((h,))
    shards = Shards.gather(h.operand, in_shards=ex.collective_matmul)
    return shards.each(lambda part: dataclasses.replace(h, operand=named(part, name)))


def _as_received(h: Any, *_: Any) -> Any:
    """Return what `receive` returned: the `dispatch` of branches without experts."""
    return h


def _as_computed(out: Any) -> Any:
    """Return what `compute` returned: the `collect` of branches without experts."""
    return out


@dataclass(frozen=True)
class Branch:
    """One term of the residual stream, as a function of the stream's norm.

    The steps are separate functions so that they can be scheduled differently: with row groups, the
    steps of one group that communicate overlap the `compute` of another (`row_groups.py`).
    """

    name: str
    norm: str
    compute: Callable[[Any, Weights, AttentionContext, Execution], Any]
    """Result of `dispatch` -> input of `collect`. No communication over TENSOR."""
    bias: str | None
    post_norm: str
    scale: str | None = None
    """Name of the number that multiplies the stream after the branch, if the layer has it."""
    saved_as: str | None = None
    """Remat name of the residual stream after the branch."""
    weights: tuple[str, ...] = ()
    """Names of the weights that `receive` and `compute` use, without adapters."""
    points: tuple[str, ...] = ()
    """Points of probes and feeds within `compute` and `dispatch` (`probes.py`)."""
    role: str = "mixer"
    """"mixer" or "feed_forward": the points around it."""
    receive: Callable[[NormOutput, Weights, str, Execution], Any] = gathered
    """The norm of this device's tokens -> the norm of the tokens that `compute` processes."""
    send: Callable[[Any], jax.Array] = Shards.reduce_scatter
    """Result of `collect` -> the sum for this device's tokens."""
    dispatch: Callable[[Any, Weights, AttentionContext, Execution], Any] = _as_received
    """Result of `receive` -> input of `compute`: communication over EXPERT, and TENSOR."""
    collect: Callable[[Any], Any] = _as_computed
    """Result of `compute` -> input of `send`: communication over EXPERT, and TENSOR."""

    @property
    def input_point(self) -> str:
        """The point at the branch's normalized input."""
        return f"{self.role}_input"

    @property
    def output_point(self) -> str:
        """The point at what the branch adds to the residual stream."""
        return f"{self.role}_output"

    def function(self, h: Any, w: Weights, context: AttentionContext, ex: Execution) -> Any:
        """Return the input of `send` from the result of `receive`."""
        return self.collect(self.compute(self.dispatch(h, w, context, ex), w, context, ex))

    def split(self, w: Weights) -> tuple[Weights, Weights]:
        """Select this branch's weights: (norms and bias, matrices with their adapters)."""
        around = {self.norm, f"{self.norm}_bias", self.bias, self.post_norm, self.scale}
        vectors = {name: a for name, a in w.items() if name in around}
        matrices = {name: a for name, a in w.items() if lora.matrix_of(name) in self.weights}
        return vectors, matrices | probes.at_points(w, self.points)

    def normalize(
        self, x: jax.Array, vectors: Weights, ex: Execution
    ) -> tuple[jax.Array, NormOutput]:
        """Return x and its norm. Use the returned x, so that one pass computes both gradients.

        In layers without norms of inputs (`layer_kinds.norms_of`), the norm is x itself.
        """
        if self.norm not in vectors:
            return x, NormOutput(x)
        return norm_of_stream(x, vectors, self.norm, ex)

    def normalized(self, out: jax.Array, vectors: Weights, m: ModelConfig) -> jax.Array:
        """Return the branch's output with its bias, after a norm if the layer has one of it."""
        out = linear.add_bias(out, vectors.get(self.bias or ""))
        last = vectors.get(self.post_norm)
        return _added_by_norm(out) if last is None else norm(out, last, m)

    def add(self, x: jax.Array, out: jax.Array, vectors: Weights, m: ModelConfig) -> jax.Array:
        """Add the branch's `normalized` output to x.

        The last branch of a layer then scales the stream, with `model.layer_scale`.
        """
        x = x + (out if m.branch_factor == 1 else out * m.branch_factor)
        scale = vectors.get(self.scale or "")
        if scale is not None:  # in float32, for its gradient: a sum over all tokens
            x = (x.astype(jnp.float32) * scale).astype(x.dtype)
        return named(x, self.saved_as) if self.saved_as else x


@jax.custom_vjp
def _added_by_norm(out: jax.Array) -> jax.Array:
    """Keep a matmul's result separate, so that the pass of the next norm adds it to the stream.

    XLA would let the matmul add to x in place, and would first copy x for the backward."""
    return lax.optimization_barrier(out)


_added_by_norm.defvjp(lambda out: (_added_by_norm(out), None), lambda _, g: (g,))


ATTENTION = Branch(
    "attention",
    norm="attn_norm",
    compute=attention.heads,
    weights=attention.WEIGHTS,
    points=("queries",),
    bias="bo",
    post_norm="attn_post_norm",
    saved_as="attn_residual",
)
DELTA_NET = dataclasses.replace(
    ATTENTION, name="delta_net", compute=delta_net.mix, weights=delta_net.WEIGHTS, bias=None
)
MAMBA = dataclasses.replace(
    ATTENTION, name="mamba", compute=mamba.mix, weights=mamba.WEIGHTS, bias=None
)
KIMI_DELTA = dataclasses.replace(
    ATTENTION, name="kimi_delta", compute=kimi_delta.mix, weights=kimi_delta.WEIGHTS, bias=None
)
LATENT_ATTENTION = dataclasses.replace(
    ATTENTION,
    compute=latent_attention.heads,
    weights=latent_attention.WEIGHTS,
    receive=latent_attention.received,
    bias=None,
)
FEED_FORWARD = Branch(
    "feed_forward",
    norm="mlp_norm",
    compute=feed_forward.glu,
    weights=feed_forward.WEIGHTS,
    bias="b_down",
    post_norm="mlp_post_norm",
    role="feed_forward",
    scale="layer_scale",
)
EXPERTS = dataclasses.replace(
    FEED_FORWARD,
    compute=experts.mixture,
    weights=experts.WEIGHTS,
    points=("choice", "routing"),
    receive=experts.received,
    dispatch=experts.dispatched,
    collect=experts.collected,
    send=experts.summed,
    bias=None,  # that of each row's expert is part of `compute`
)


TWO_MATRICES = dataclasses.replace(
    FEED_FORWARD, compute=gpt_feed_forward.two_matrices, weights=gpt_feed_forward.WEIGHTS
)

#: The branches that mix tokens, by a weight that each has.
MIXERS = {
    "wqkv": ATTENTION,
    "wqk": ATTENTION,
    "wkv_a": LATENT_ATTENTION,
    "delta_in": DELTA_NET,
    "mamba_in": MAMBA,
    "kda_in": KIMI_DELTA,
}


def branches(w: Weights) -> tuple[Branch, ...]:
    """Return the branches of a layer with these weights, in order."""
    mixers = [branch for name, branch in MIXERS.items() if name in w]
    if "w_down" not in w:
        return tuple(mixers)
    if "router" in w:
        second = EXPERTS
    else:
        second = FEED_FORWARD if {"w_gate", "w_gate_up"} & w.keys() else TWO_MATRICES
    if "attn_norm" in w and "mlp_norm" not in w:  # one norm for both
        second = dataclasses.replace(second, norm="attn_norm")
    return *mixers, second


def branches_with_weights(w: Weights) -> list[tuple[Branch, Weights, Weights]]:
    """Return each branch with its vectors and matrices (`Branch.split`).

    Raises:   ValueError for a weight that no branch names, which would silently have no effect.
    """
    found = [(branch, *branch.split(w)) for branch in branches(w)]
    unused = set(w).difference(probes.at_points(w, probes.OF_LAYER))
    unused = unused.difference(*(own for _, *parts in found for own in parts))
    if unused:
        raise ValueError(f"no branch of the layer uses {sorted(unused)}: name them in its WEIGHTS")
    return found
