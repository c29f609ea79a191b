"""The decoder with a KV cache: complete prompts first, then one token at a time.

Runs on a mesh with only the tensor axis. Each rank holds the complete residual stream, not a shard
of the sequence as in training, because a step may have a single token. The key at position s of a
row is in slot s of the cache. A slot that is not yet written, or holds padding after a shorter
prompt, is in the future of all queries, so the causal mask hides it.

LongRoPE has short divisors for texts of up to `original_max_position` tokens, and long ones for
longer texts. A row's divisors are those of its present length. When they change, whoever calls
`step` has to call `prompt` again.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.config import Config, ModelConfig, registry
from jaxpar.config.layout.layer_kinds import ATTENTIONS, RECURRENT, kinds, of_kind
from jaxpar.execution.decisions import execution_of
from jaxpar.kernels.attention import AttentionMask, attention
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import embedding, norm, transformer
from jaxpar.model.attention import gated, positioned, qkv
from jaxpar.model.attention_context import AttentionContext, attention_context
from jaxpar.model.latent_attention import decode as latents
from jaxpar.model.layer import branches
from jaxpar.model.linear import row_parallel
from jaxpar.model.loss import softcapped
from jaxpar.model.moe import experts
from jaxpar.model.recurrent import decode as recurrent
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR
from jaxpar.sharding.batch import Batch

type Tree = dict[str, Any]


@flax.struct.dataclass
class Cache:
    """What each layer holds of the text so far.

    In latent attention, `keys` are the latents, [B, S, 1, Rkv], and `values` the rotary keys,
    [B, S, 1, R], complete on each tensor rank (`latent_attention/decode.py`).
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    """[B, S, G/tensor, K] in the compute dtype; None for layers without attention."""
    states: tuple[Any, ...]
    """`recurrent.decode.State`; None for layers that are not recurrent."""

    @property
    def slots(self) -> int:
        """S."""
        return next(a.shape[1] for a in self.keys if a is not None)

    def layers(self) -> list[tuple[Any, Any, Any]]:
        """Return what each layer holds: (keys, values, state)."""
        return list(zip(self.keys, self.values, self.states, strict=True))

    @classmethod
    def of_layers(cls, held: list[tuple[Any, Any, Any]]) -> "Cache":
        """Return the cache of what each layer holds."""
        return cls(*zip(*held, strict=True))


def cache_specs(m: ModelConfig) -> Cache:
    """Return how the arrays of a cache are split over a mesh."""
    of_heads = PartitionSpec(None, None, TENSOR)
    slots = tuple(of_heads if kind in ATTENTIONS else None for kind in kinds(m))
    states = tuple(recurrent.SPEC if kind in RECURRENT else None for kind in kinds(m))
    return Cache(slots, slots, states)


def cache_bytes(m: ModelConfig, rows: int, slots: int, tensor: int = 1) -> int:
    """Return the bytes of the cache on one device.

    Keys and values are 2 B S G K / tensor numbers for each layer with attention. In latent
    attention, B S (Rkv + R). The states of recurrent layers do not depend on S.
    """
    with_attention = (of_kind(m, kind) for kind in kinds(m) if kind in ATTENTIONS)
    of_token = sum(heads * dim for layer in with_attention for heads, dim in _slot(layer, tensor))
    held = rows * slots * of_token * jnp.dtype(m.dtype).itemsize
    states = (
        recurrent.state_bytes(m, kind, rows, tensor) for kind in kinds(m) if kind in RECURRENT
    )
    return held + sum(states)


def _slot(m: ModelConfig, tensor: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of a token's entries in `Cache.keys` and `Cache.values`."""
    if m.kv_lora_rank:
        return (1, m.kv_lora_rank), (1, m.qk_rope_head_dim)
    each = m.num_kv_heads // tensor, m.head_dim
    return each, each


def empty_cache(m: ModelConfig, rows: int, slots: int) -> Cache:
    """Return this device's shard of a cache of zeros."""
    zeros = lambda shape: jnp.zeros((rows, slots, *shape), m.dtype)  # noqa: E731
    tensor = lax.axis_size(TENSOR)
    keys, values = (
        tuple(
            zeros(_slot(of_kind(m, kind), tensor)[i]) if kind in ATTENTIONS else None
            for kind in kinds(m)
        )
        for i in (0, 1)
    )
    empty = functools.partial(recurrent.empty_state, m, rows=rows)
    states = tuple(empty(kind) if kind in RECURRENT else None for kind in kinds(m))
    return Cache(keys, values, states)


def prompt(
    weights: Tree, tokens: jax.Array, lengths: jax.Array, cache: Cache, cfg: Config
) -> tuple[jax.Array, Cache]:
    """Run the decoder on prompts and write what its layers hold of them into an empty cache.

    Args:     weights: fused, in the compute dtype, one tree per layer. tokens: int32 [B, T],
              padded at the end. lengths: int32 [B], of the prompts. cache: with at least T slots.
    Returns:  (the last layer's output after the final norm, [B, T, D]; the cache).
    Communication: two all-reduces over TENSOR per layer, and one for the embedding.
    """
    return _through(weights, tokens, jnp.zeros(len(tokens), jnp.int32), cache, cfg, lengths)


def step(
    weights: Tree,
    tokens: jax.Array,
    position: jax.Array,
    cache: Cache,
    cfg: Config,
    length: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Run the decoder on the next tokens of each row: one, or several to verify drafts.

    Tokens after the first may be wrong. What the cache holds of them is in the future of the right
    ones, which overwrite it: a text goes back by its position alone.

    Args:     tokens: int32 [B, T]. position: int32 [B], of the first ones. weights, cache: as in
              `prompt`. Recurrent layers take one token at a time, T = 1. length: int32 [B], of the
              text that decides LongRoPE's divisors; None for that with all these tokens.
    Returns, Communication: as `prompt`.
    """
    return _through(weights, tokens, position, cache, cfg, None, length)


def logits(weights: Tree, h: jax.Array, m: ModelConfig) -> jax.Array:
    """Compute logits: [B, D] -> float32 [B, V], complete on each device.

    Communication: an all-gather over TENSOR.
    """
    local = jnp.dot(h, weights["top"]["head"], preferred_element_type=jnp.float32)
    return softcapped(lax.all_gather(local, TENSOR, axis=1, tiled=True), m.logits_softcap)


def _through(
    weights, tokens, first, cache: Cache, cfg: Config, lengths: jax.Array | None, of_text=None
):
    """Run all layers. With `lengths`, tokens see only each other, so the cache is not read.

    Args:     of_text: `length` of `step`.
    """
    if of_text is None:
        of_text = first + tokens.shape[1] if lengths is None else lengths
    positions, described = context_of(tokens, first, of_text, cache.slots, cfg)
    x = embed(weights["top"], tokens, positions, cfg.model)
    (chunk,) = weights["layers"]
    contexts = [
        of_these
        for alike, of_these in transformer.runs_of_layers(chunk, described, cfg)
        for _ in alike
    ]
    held = cache.layers()
    for i, (w, kind) in enumerate(zip(chunk, contexts, strict=True)):
        x, held[i] = layer(x, w, kind, held[i], first, cfg, lengths)
    h = transformer.before_logits(weights["top"], x, cfg.model)
    return h, Cache.of_layers(held)


def layer(
    x: jax.Array,
    w: Tree,
    context: AttentionContext,
    held: tuple[Any, Any, Any],
    first: jax.Array,
    cfg: Config,
    lengths: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, Any, Any]]:
    """Run one layer on new tokens of each row.

    Args:     x: [B, T, D]. w: fused. held: of the layer, from `Cache.layers`. first: int32 [B],
              positions of the first tokens. lengths: int32 [B], of complete prompts, whose tokens
              see only each other; None to read the cache.
    Returns:  (x, held).
    """
    (key, value, state), before = held, x
    if key is not None:
        x, (key, value) = _attention(
            x, w, context, (key, value), first, cfg.model, lengths is not None
        )
    elif state is not None:
        positions = _positions(first, x.shape[1])
        x, state = _recurrence(x, w, positions, state, cfg.model, lengths)
    if "w_down" in w:
        x = _feed_forward(x, before if cfg.model.parallel_block else x, w, context, cfg)
    return x, (key, value, state)


def context_of(
    tokens: jax.Array, first: jax.Array, lengths: jax.Array, slots: int, cfg: Config
) -> tuple[jax.Array, AttentionContext]:
    """Return the positions and the attention context of new tokens, int32 [B, T].

    Args:     lengths: int32 [B], tokens of each row's text, with these.
    """

    positions = _positions(first, tokens.shape[1])
    batch = Batch(tokens, tokens, jnp.ones_like(tokens), positions)
    described = attention_context(batch, cfg, max_segments=1, length=slots, lengths=lengths)
    return positions, described


def last_of_short_angles(m: ModelConfig) -> int | None:
    """Return after how many tokens of a text LongRoPE's angles are others; None without it."""
    s = m.rope_scaling
    return s.original_max_position if s is not None and s.kind == "longrope" else None


def _positions(first: jax.Array, count: int) -> jax.Array:
    return first[:, None] + jnp.arange(count, dtype=jnp.int32)


def embed(top: Tree, tokens: jax.Array, positions: jax.Array, m: ModelConfig) -> jax.Array:
    """Compute the residual stream before the first layer, [B, T, D].

    Communication: an all-reduce over TENSOR.
    """
    look_up = lambda table, rows: embedding.embedding_lookup(table, rows, len(table), m.dtype)  # noqa: E731
    x = embedding.scaled(lax.psum(look_up(top["embed"], tokens), TENSOR), m)
    if m.positions == "learned":
        x += lax.psum(look_up(top["positions"], positions), TENSOR)
    return x


def _attention(x, w: Tree, context: AttentionContext, held, first, m: ModelConfig, alone: bool):
    """Add the layer's attention to x. `alone`: new tokens see only each other."""
    branch = branches(w)[0]
    h = _normalized(x, w, branch.norm, m)
    attend = _latent if m.kv_lora_rank else _grouped
    out, held = attend(h, w, context, held, first, of_kind(m, context.kind), alone)
    side_by_side = gated(out.reshape(*out.shape[:2], -1), Shards((h,)), w)
    partial = row_parallel(side_by_side, w, "wo", "attn_out")
    out = branch.normalized(lax.psum(partial, TENSOR), w, m)
    return branch.add(x, out, w, m), held


def _recurrence(x, w: Tree, positions, held, m: ModelConfig, lengths: jax.Array | None):
    """Add the layer's recurrence to x. With `lengths`, of complete prompts."""
    branch = branches(w)[0]
    h, kind = _normalized(x, w, branch.norm, m), recurrent.kind_of(w)
    if lengths is None:
        out, held = kind.token(h, w, positions, held, m)
    else:
        out, held = kind.prompt(h, w, positions, lengths, m)
    partial = row_parallel(out, w, kind.output, "attn_out")
    out = branch.normalized(lax.psum(partial, TENSOR), w, m)
    return branch.add(x, out, w, m), held


def _feed_forward(x, of: jax.Array, w: Tree, context: AttentionContext, cfg: Config):
    """Add the layer's feed-forward branch to x. of: the residual stream that it reads."""
    branch, ex = branches(w)[-1], execution_of(cfg)
    h = _normalized(of, w, branch.norm, cfg.model)
    if "router" in w:
        partial = branch.function(experts.whole(h, w), w, context, ex).partial
    else:
        (partial,) = branch.function(Shards((h,)), w, context, ex).parts
    out = branch.normalized(lax.psum(partial, TENSOR), w, cfg.model)
    return branch.add(x, out, w, cfg.model)


def _grouped(h, w: Tree, context: AttentionContext, held, first, m: ModelConfig, alone: bool):
    """Attend with grouped queries: (out [B, T, H, K], the cache's entries)."""
    q, k, v = qkv(h, w, m)
    q, k = positioned(q, k, w, context, m)
    held = _write(held[0], k, first), _write(held[1], v, first)
    if alone:
        return _attend(q, k, v, context.mask, w, m, m.attention_backend), held
    return _attend(q, held[0], held[1], _of_cache(context, held[0]), w, m, "reference"), held


def _latent(h, w: Tree, context: AttentionContext, held, first, m: ModelConfig, alone: bool):
    """Attend with latents: (out [B, T, H, I], the cache's entries)."""
    c, new = latents.latents_and_entries(h, w, context.rope, m)
    held = _write(held[0], new[0], first), _write(held[1], new[1], first)
    if alone:
        return latents.among_new(c, new, w, context.rope, context.mask, m), held
    mask = _of_cache(context, held[0])
    return latents.to_cache(c, held, w, context.rope, mask, m), held


def _of_cache(context: AttentionContext, held: jax.Array) -> AttentionMask:
    """Return the mask of new tokens' queries and the cache's slots, [B, S, ...]."""
    slots = jnp.broadcast_to(jnp.arange(held.shape[1], dtype=jnp.int32), held.shape[:2])
    chunks = lambda a: None if context.chunk is None else a // context.chunk  # noqa: E731
    return dataclasses.replace(
        context.mask,
        kv_positions=slots,
        q_segments=chunks(context.mask.q_positions),
        kv_segments=chunks(slots),
        in_order=False,
    )


def _normalized(x: jax.Array, w: Tree, name: str, m: ModelConfig) -> NormOutput:
    return NormOutput(norm.named_norm(x, w, name, m) if name in w else x)


def _attend(q, k, v, mask, w: Tree, m: ModelConfig, backend: str) -> jax.Array:
    if function := registry.function("model.attention", m.attention):
        return function(q, k, v, mask)
    sinks, softcap = w.get("sinks"), m.attention_softcap
    return attention(q, k, v, mask, sinks=sinks, softcap=softcap, backend=backend)[0]


def _write(held: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """Write [B, T, G, K] into the slots that start at each row's `first`."""
    put = lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, 0)  # noqa: E731
    return jax.vmap(put)(held, new, first)
