"""What layers know of a microbatch's tokens: attention masks, rotary tables, positions.

`attention_context` computes them once: a view for each kind of attention of the model, by its
window, its chunks and its rotary embedding. `context_of_layer` selects that of one layer.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.attention import Attention, QueryGrowth
from jaxpar.components.component import Mixer, Term
from jaxpar.components.costs import Heads
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer
from jaxpar.components.rope import Rope
from jaxpar.config import Config, Model
from jaxpar.kernels.attention import AttentionMask
from jaxpar.model.rope import Tables, query_growth, query_scale, rope_tables
from jaxpar.parallel.context import mask_across
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.batch import Batch


class AttentionView(NamedTuple):
    """How a kind of attention sees the tokens of a sequence."""

    window: int | None = None
    chunk: int | None = None
    rope: Rope | None = None
    dims: int = 0
    """Of each head, those that the rotary embedding turns."""
    growth: QueryGrowth | None = None

    @classmethod
    def of(cls, mixer: Mixer | None) -> "AttentionView":
        """Return the view of a mixer; of one that is no attention, all tokens before."""
        match mixer:
            case Attention() as a:
                return cls(a.window, a.chunk, a.rope, a.rotary_dims, a.growth)
            case LatentAttention() as a:
                return cls(a.window, a.chunk, a.rope, a.rotary_dims)
        return cls()


@flax.struct.dataclass
class AttentionContext:
    """The attention mask and rotary tables of a microbatch, for the layers with one view."""

    mask: AttentionMask
    rope: Tables | None
    """None in layers without a rotary embedding."""
    query_scale: jax.Array | None = None
    """The factor of every token's queries, of `RopeScaling.query_beta` or `QueryGrowth`."""
    of: Layer | None = flax.struct.field(pytree_node=False, default=None)
    """The layer that reads it (`context_of_layer`)."""
    chunk: int | None = flax.struct.field(pytree_node=False, default=None)
    """`Attention.chunk` of these layers. The mask's segments are then chunks."""
    loss_weight: jax.Array | None = None
    """float32 [B]: factor of the losses of the router (`router.with_losses`). None outside training
    and without experts."""
    positions: jax.Array | None = None
    """int32 [B, T/sequence]: of the tokens in their document. None if all mixers are attention."""
    segments: jax.Array | None = None
    """int32 [B, T/sequence]: their documents, or 1. None as `positions`."""
    rows: jax.Array | None = None
    """int32 [B]: `Batch.rows`, if a probe or a feed is by row."""
    probes: tuple = flax.struct.field(pytree_node=False, default=())
    feeds: tuple = flax.struct.field(pytree_node=False, default=())
    """What leaves and enters the layers (`probes.py`); () outside training."""

    @property
    def layer(self) -> Layer:
        """The layer that reads it."""
        assert self.of is not None, "the context of all layers: see context_of_layer"
        return self.of


@flax.struct.dataclass
class Contexts:
    """The contexts of a model's layers, by their view."""

    views: tuple[AttentionView, ...] = flax.struct.field(pytree_node=False)
    each: tuple[AttentionContext, ...]

    def map(self, fn: Callable[[AttentionContext], AttentionContext]) -> "Contexts":
        """Apply a function to each context."""
        return Contexts(self.views, tuple(map(fn, self.each)))


def views_of(m: Model) -> tuple[AttentionView, ...]:
    """Return the different views of a model's attention, in the order of the first layers that have
    them; one, if there is no attention."""
    layers = [*m.layers, *[m.module_layer] * (m.mtp_depth > 0)]
    mixers = [layer.mixer for layer in layers]
    attends = [one for one in mixers if isinstance(one, Attention | LatentAttention)]
    return tuple(dict.fromkeys(map(AttentionView.of, attends))) or (AttentionView(),)


def attention_context(
    batch: Batch,
    cfg: Config,
    max_segments: int | None,
    length: int | None = None,
    lengths: jax.Array | None = None,
) -> Contexts:
    """Compute the masks and rotary tables of a microbatch from its positions and segments.

    Args:     length: tokens of the longest sequence; None for those of the batch's rows. lengths:
              int32 [B], of each row, if LongRoPE's divisors are those of its own length.
    """
    length, views = length or batch.positions.shape[1] * cfg.parallel.sequence, views_of(cfg.model)
    return Contexts(
        views, tuple(_describe(view, batch, cfg, max_segments, length, lengths) for view in views)
    )


def context_of_layer(contexts: Contexts, layer: Layer) -> AttentionContext:
    """Return the context of one layer."""
    view = AttentionView.of(layer.mixer)
    at = contexts.views.index(view) if view in contexts.views else 0
    return dataclasses.replace(contexts.each[at], of=layer)


def attention_layers(m: Model) -> tuple[Layer, ...]:
    """Return a layer of each kind of softmax attention: of other heads, or with a mask of its
    own."""
    found: dict[tuple, Layer] = {}
    for layer in m.layers:
        heads = layer.mixer.attention_heads if layer.mixer else None
        view = AttentionView.of(layer.mixer)
        if heads and not heads.is_own:
            found.setdefault((heads, view.window, view.chunk), layer)
    return tuple(found.values())


def heads_of(layer: Layer) -> Heads:
    """Return the heads of one of `attention_layers`."""
    heads = layer.mixer.attention_heads if layer.mixer else None
    assert heads is not None
    return heads


def masks_of(batch: Batch, cfg: Config, max_segments: int) -> tuple[AttentionMask, ...]:
    """Return the attention mask of a batch in each of `attention_layers`."""
    context = attention_context(batch, cfg, max_segments)
    return tuple(context_of_layer(context, layer).mask for layer in attention_layers(cfg.model))


def component[C: Term](context: AttentionContext, kind: type[C]) -> C:
    """Return the mixer or the feed-forward of the layer that reads a context."""
    found = context.layer.mixer if issubclass(kind, Mixer) else context.layer.feed_forward
    assert isinstance(found, kind)
    return found


def counted_once(contexts: Contexts) -> Contexts:
    """Return the contexts of layers that all stages of a pipeline compute, with the losses of
    routers on the first stage alone."""
    weight = contexts.each[0].loss_weight
    if weight is None or lax.axis_size(PIPELINE) == 1:
        return contexts
    return with_loss_weight(contexts, weight * (lax.axis_index(PIPELINE) == 0))


def with_probes(contexts: Contexts, probes: tuple, feeds: tuple) -> Contexts:
    """Say what leaves and enters the layers."""
    return contexts.map(lambda one: dataclasses.replace(one, probes=probes, feeds=feeds))


def with_loss_weight(contexts: Contexts, weight: jax.Array) -> Contexts:
    """Add the factor of the routers' losses."""
    return contexts.map(lambda one: dataclasses.replace(one, loss_weight=weight))


def across_devices(contexts: Contexts, cfg: Config) -> Contexts:
    """Extend the masks to other devices' tokens by `mask_across`, once for all layers."""

    def across(context: AttentionContext) -> AttentionContext:
        mask = mask_across(context.mask, cfg.parallel.context)
        return dataclasses.replace(context, mask=mask if context.chunk is None else numbered(mask))

    return contexts.map(across)


def _describe(
    view: AttentionView,
    batch: Batch,
    cfg: Config,
    max_segments: int | None,
    length: int,
    lengths: jax.Array | None,
) -> AttentionContext:
    segments = batch.segment_ids if cfg.data.document_mask else None
    if view.chunk is not None:
        segments = chunks(batch.positions, segments, view.chunk, length)
        if max_segments is not None:
            max_segments += length // view.chunk
    in_order = cfg.parallel.sequence == 1 or cfg.parallel.context == "ulysses"
    mask = AttentionMask(
        q_positions=batch.positions,
        kv_positions=batch.positions,
        q_segments=segments,
        kv_segments=segments,
        window=view.window,
        max_segments=max_segments,
        in_order=in_order,
    )
    if view.chunk is not None and cfg.parallel.sequence == 1:
        mask = numbered(mask)
    tables, scale = None, None
    if view.rope is not None:
        longest = length if lengths is None else lengths
        tables = rope_tables(batch.positions, view.rope, view.dims, longest)
        scale = query_scale(batch.positions, view.rope)
    elif view.growth is not None:
        scale = query_growth(batch.positions, view.growth)
    mixers = {layer.mixer for layer in cfg.model.layers}
    others = any(one and not isinstance(one, Attention | LatentAttention) for one in mixers)
    own = any(one and not one.uses_products for one in mixers)
    return AttentionContext(
        mask=mask,
        rope=tables,
        query_scale=scale,
        chunk=view.chunk,
        positions=batch.positions if others else None,
        segments=_documents(batch, cfg) if own else None,
        rows=batch.rows,
    )


def _documents(batch: Batch, cfg: Config) -> jax.Array:
    ids = batch.segment_ids
    return ids if cfg.data.document_mask else jnp.ones_like(ids)


def chunks(positions: jax.Array, segments: jax.Array | None, size: int, length: int) -> jax.Array:
    """Return a segment for each chunk of a document, so that every kernel attends within chunks.

    Args:     positions: int32 [B, T], in their documents. segments: documents, int32 [B, T]; None
              for one. length: tokens of the longest sequence.
    Returns:  int32 [B, T], not numbered consecutively, and the same for tokens in any order.
    """
    before = 0 if segments is None else segments * (length // size + 1)
    return before + positions // size


def numbered(mask: AttentionMask) -> AttentionMask:
    """Number a mask's segments from 1 in each row, if its tokens are in text order."""
    if not mask.in_order:
        return mask
    begins = mask.q_segments != jnp.roll(mask.q_segments, 1, axis=1)
    segments = jnp.cumsum(begins.at[:, 0].set(True), axis=1, dtype=jnp.int32)
    return dataclasses.replace(mask, q_segments=segments, kv_segments=segments)
