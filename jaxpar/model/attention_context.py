"""The attention context of a microbatch: its attention mask and rotary tables."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.attention import Attention
from jaxpar.components.component import Component, Mixer
from jaxpar.components.costs import Heads
from jaxpar.components.flags import model_of
from jaxpar.components.latent_attention import LatentAttention
from jaxpar.components.model import Layer
from jaxpar.config import Config, ModelConfig
from jaxpar.config.layout.layer_kinds import (
    ATTENTION,
    GLOBAL,
    has_global_layers,
    is_recurrent,
    of_kind,
)
from jaxpar.kernels.attention import AttentionMask
from jaxpar.model.rope import Tables, nope_query_scale, query_scale, rope_tables
from jaxpar.parallel.context import mask_across
from jaxpar.sharding.axes import PIPELINE
from jaxpar.sharding.batch import Batch


@flax.struct.dataclass
class AttentionContext:
    """The attention mask and rotary tables of a microbatch, shared by all layers."""

    mask: AttentionMask
    rope: Tables | None
    """None in layers without a rotary embedding."""
    query_scale: jax.Array | None = None
    """`rope.query_scale` of every token; None without `rope_scaling.query_beta`."""
    nope_query_scale: jax.Array | None = None
    """The same for layers without a rotary embedding; None without `nope_query_beta`."""
    of: Layer | None = flax.struct.field(pytree_node=False, default=None)
    """The layer that reads it (`context_of_layer`). None: the context of all layers."""
    chunk: int | None = flax.struct.field(pytree_node=False, default=None)
    """`model.attention_chunk` of these layers. The mask's segments are then chunks."""
    in_global: "AttentionContext | None" = None
    """The context of layers without a window, in models where only some layers have one."""
    loss_weight: jax.Array | None = None
    """float32 [B]: factor of the losses of the router (`router.with_losses`). None outside training
    and without experts."""
    positions: jax.Array | None = None
    """int32 [B, T/sequence]: of the tokens in their document. None without recurrent layers."""
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


def attention_context(
    batch: Batch,
    cfg: Config,
    max_segments: int | None,
    length: int | None = None,
    lengths: jax.Array | None = None,
) -> AttentionContext:
    """Compute the mask and rotary tables of a microbatch from its positions and segments.

    Args:     length: tokens of the longest sequence; None for those of the batch's rows. lengths:
              int32 [B], of each row, if LongRoPE's divisors are those of its own length.
    """
    m = cfg.model
    length = length or batch.positions.shape[1] * cfg.parallel.sequence
    describe = functools.partial(
        _describe, batch, cfg, max_segments, length=length, lengths=lengths
    )
    if not has_global_layers(m):
        return describe(m)
    kind = GLOBAL if GLOBAL in m.layer_pattern else ATTENTION
    of_global = dataclasses.replace(of_kind(m, kind), sliding_window=None, attention_chunk=None)
    local, everywhere = describe(_of_local_layers(m)), describe(of_global)
    return dataclasses.replace(local, in_global=everywhere)


def context_of_layer(context: AttentionContext, layer: Layer) -> AttentionContext:
    """Return the context of one layer, from that of all: its mask and its rotary embedding."""
    mixer = layer.mixer
    if not isinstance(mixer, Attention | LatentAttention):
        return dataclasses.replace(context, in_global=None, of=layer)
    if mixer.window is None and mixer.chunk is None:
        context = context.in_global or context
    context = dataclasses.replace(context, in_global=None, of=layer)
    if mixer.rope is None:
        grown = context.nope_query_scale
        grown = context.query_scale if grown is None else grown
        context = dataclasses.replace(context, rope=None, query_scale=grown)
    return context


def attention_layers(m: ModelConfig) -> tuple[Layer, ...]:
    """Return a layer of each kind of attention: of other heads, or with a mask of its own."""
    found: dict[tuple, Layer] = {}
    for layer in model_of(m).layers:
        if layer.mixer and layer.mixer.attention_heads:
            found.setdefault((layer.mixer.attention_heads, layer.mixer.is_local), layer)
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


def _of_local_layers(m: ModelConfig) -> ModelConfig:
    """Return the model with the rotary embedding of its sliding-window layers."""
    theta = m.rope_theta if m.local_rope_theta is None else m.local_rope_theta
    scaling = m.rope_scaling if m.local_rope_scaling else None
    return dataclasses.replace(m, rope_theta=theta, rope_scaling=scaling)


def component[C: Component](context: AttentionContext, kind: type[C]) -> C:
    """Return the mixer or the feed-forward of the layer that reads a context."""
    found = context.layer.mixer if issubclass(kind, Mixer) else context.layer.feed_forward
    assert isinstance(found, kind)
    return found


def counted_once(context: AttentionContext) -> AttentionContext:
    """Return the context of a layer that all stages of a pipeline compute, with the losses of its
    router on the first stage alone."""
    if context.loss_weight is None or lax.axis_size(PIPELINE) == 1:
        return context
    once = lax.axis_index(PIPELINE) == 0
    return with_loss_weight(context, context.loss_weight * once)


def with_probes(context: AttentionContext, probes: tuple, feeds: tuple) -> AttentionContext:
    """Say what leaves and enters the layers of a context."""
    if context.in_global is not None:
        context = dataclasses.replace(
            context, in_global=with_probes(context.in_global, probes, feeds)
        )
    return dataclasses.replace(context, probes=probes, feeds=feeds)


def with_loss_weight(context: AttentionContext, weight: jax.Array) -> AttentionContext:
    """Add the factor of the router's losses to a context."""
    if context.in_global is not None:
        context = dataclasses.replace(
            context, in_global=with_loss_weight(context.in_global, weight)
        )
    return dataclasses.replace(context, loss_weight=weight)


def across_devices(context: AttentionContext, cfg: Config) -> AttentionContext:
    """Extend a context to other devices' tokens by `mask_across`, once for all layers."""
    if context.in_global is not None:
        context = dataclasses.replace(context, in_global=across_devices(context.in_global, cfg))
    mask = mask_across(context.mask, cfg.parallel.context)
    return dataclasses.replace(context, mask=mask if context.chunk is None else numbered(mask))


def _describe(
    batch: Batch,
    cfg: Config,
    max_segments: int | None,
    m: ModelConfig,
    *,
    length: int,
    lengths: jax.Array | None,
) -> AttentionContext:
    segments = batch.segment_ids if cfg.data.document_mask else None
    if m.attention_chunk is not None:
        segments = chunks(batch.positions, segments, m.attention_chunk, length)
        if max_segments is not None:
            max_segments += length // m.attention_chunk
    in_order = cfg.parallel.sequence == 1 or cfg.parallel.context == "ulysses"
    mask = AttentionMask(
        q_positions=batch.positions,
        kv_positions=batch.positions,
        q_segments=segments,
        kv_segments=segments,
        window=m.sliding_window,
        max_segments=max_segments,
        in_order=in_order,
    )
    if m.attention_chunk is not None and cfg.parallel.sequence == 1:
        mask = numbered(mask)
    rotates = m.positions == "rope" and m.rope_fraction
    longest = length if lengths is None else lengths
    rope = rope_tables(batch.positions, m, longest) if rotates else None
    later, positions = query_scale(batch.positions, m), batch.positions if is_recurrent(m) else None
    return AttentionContext(
        mask=mask,
        rope=rope,
        query_scale=later,
        nope_query_scale=nope_query_scale(batch.positions, m),
        chunk=m.attention_chunk,
        positions=positions,
        rows=batch.rows,
    )


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
