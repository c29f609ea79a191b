"""How components of users compute: theirs see plain arrays, and this file the mesh.

    compute(x, w, tokens)    a `Mixer`: whole sequences [B, S, D] -> [B, S, D]
    compute(x, w)            a `FeedForward`: some of the tokens [B, T, D] -> [B, T, D]
    heads(q, k, v, mask)     an `Attention`: this rank's heads, all keys -> [B, T, H, K]

x is the norm of the residual stream, and w a dict of this tensor rank's weights, complete over the
FSDP axes, with the dims that the component declares; if it `uses_products`, as matrices with their
adapters, for `linear`. A component that splits dims over TENSOR
("heads", "kv_heads", "mlp") returns this rank's part of a sum over all ranks; of one that splits
none, the first rank's result is taken. While text is generated, a mixer computes all tokens of the
text again: it holds its inputs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.components.attention import Attention
from jaxpar.components.component import FeedForward, Mixer, Term, Tokens
from jaxpar.components.weight import Weight
from jaxpar.config import Config
from jaxpar.config.layout.composition import model_of
from jaxpar.execution.decisions import Execution
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.held import HeldSize, NewTokens
from jaxpar.parallel.collectives import all_gather, share
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import RULES, SEQUENCE, TENSOR

type Weights = dict[str, Any]


def feed_forward(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Apply a user's feed-forward to each shard of the sequence."""
    own = component(context, FeedForward)
    declared = own.weights(model_of(ex.cfg.model))

    def of_shard(h: NormOutput, w: Weights) -> jax.Array:
        return _partial(own.compute(h.whole(), _given(own, w, declared), None), declared)

    return h.map(of_shard, w)


def mixer(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Apply a user's mixer to whole sequences; each device keeps its tokens.

    Communication: gathers of the norm, positions and documents over SEQUENCE, and their transpose.
    """
    own = component(context, Mixer)
    assert context.positions is not None and context.segments is not None
    x = all_gather(h.each(NormOutput.whole).in_order(), SEQUENCE, 1)
    where = (all_gather(a, SEQUENCE, 1) for a in (context.positions, context.segments))
    declared = own.weights(model_of(ex.cfg.model))
    y = own.compute(x, _given(own, w, declared), Tokens(*where))
    return h.split(share(_partial(y, declared), SEQUENCE, 1))


def _given(own: Term, w: Weights, declared: Any) -> Weights:
    """Return a tensor rank's weights: with the dims that the component declares, or as matrices."""
    if own.uses_products:
        return w

    def shape(weight: Weight) -> list[int]:
        ways = (lax.axis_size(TENSOR) if TENSOR in RULES[a] else 1 for a in weight.axes)
        return [n // way for n, way in zip(weight.shape, ways, strict=True)]

    return {name: w[name].reshape(shape(weight)) for name, weight in declared.items() if name in w}


def _partial(y: jax.Array, declared: Any) -> jax.Array:
    """Return a part of the sum over TENSOR: y, or of ranks that compute the same, the first's."""
    splits = any(TENSOR in RULES[axis] for w in declared.values() for axis in w.axes)
    if splits or lax.axis_size(TENSOR) == 1:
        return y
    return jnp.where(lax.axis_index(TENSOR) == 0, y, jnp.zeros_like(y))


def computes_itself(term: Term) -> bool:
    """Return whether a user's component has no plain form beside what it computes."""
    if type(term).plain is not Term.plain:
        return False
    heads = isinstance(term, Attention) and type(term).heads is not Attention.heads
    return heads or not term.uses_products


# --------------------------------------------------------------------------------- generation


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Inputs:
    """What a user's mixer holds of each row's text."""

    x: Any
    """[B, S, D]: its inputs."""


#: How they are split over a mesh: complete on each tensor rank.
INPUTS = Inputs(PartitionSpec())


def held(_: Mixer, size: HeldSize) -> Inputs:
    """Return zeros for the inputs of a text."""
    return Inputs(jnp.zeros((size.rows, size.slots, size.d_model), size.dtype))


def decode(
    h: NormOutput, w: Weights, context: AttentionContext, held: Inputs, new: NewTokens, cfg: Config
) -> tuple[jax.Array, Inputs]:
    """Compute all tokens of each row again, and return those that are new.

    Later slots are of no text yet; a causal mixer does not read them.
    """
    own, x = component(context, Mixer), h.whole()
    put = lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, 0)  # noqa: E731
    text = jax.vmap(put)(held.x, x, new.first)
    slots = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32), text.shape[:2])
    declared = own.weights(model_of(cfg.model))
    y = own.compute(text, _given(own, w, declared), Tokens(slots, jnp.ones_like(slots)))
    y = jnp.take_along_axis(_partial(y, declared), new.positions[..., None], axis=1)
    return y, Inputs(text)
