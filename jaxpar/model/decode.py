"""The decoder with a KV cache: complete prompts first, then one token at a time.

Runs on a mesh with only the tensor axis. Each rank holds the complete residual stream, not a shard
of the sequence as in training, because a step may have a single token. The key at position s of a
row is in slot s of the cache. A slot that is not yet written, or holds padding after a shorter
prompt, is in the future of all queries, so the causal mask hides it.
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.config import Config, ModelConfig, registry
from jaxpar.config.layout.layer_kinds import RECURRENT, kinds, num_attention_layers
from jaxpar.execution.decisions import execution_of
from jaxpar.kernels.attention import attention
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import embedding, norm, transformer
from jaxpar.model.attention import gated, positioned, qkv
from jaxpar.model.attention_context import AttentionContext, attention_context
from jaxpar.model.layer import branches
from jaxpar.model.linear import row_parallel
from jaxpar.model.recurrent import decode as recurrent
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR
from jaxpar.sharding.batch import Batch

type Tree = dict[str, Any]


@flax.struct.dataclass
class Cache:
    """What each layer holds of the text so far."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    """[B, S, G/tensor, K] in the compute dtype; None for layers without attention."""
    states: tuple[Any, ...]
    """`recurrent.decode.State`; None for layers that are not recurrent."""

    @property
    def slots(self) -> int:
        """S."""
        return next(a.shape[1] for a in self.keys if a is not None)


def cache_specs(m: ModelConfig) -> Cache:
    """Return how the arrays of a cache are split over a mesh."""
    has_state = [kind in RECURRENT for kind in kinds(m)]
    of_heads = tuple(None if state else PartitionSpec(None, None, TENSOR) for state in has_state)
    states = tuple(recurrent.SPEC if state else None for state in has_state)
    return Cache(of_heads, of_heads, states)


def cache_bytes(m: ModelConfig, rows: int, slots: int, tensor: int = 1) -> int:
    """Return the bytes of the cache on one device.

    Keys and values are 2 L B S G K / tensor numbers, for L layers with attention. The states of
    recurrent layers do not depend on S.
    """
    numbers = 2 * num_attention_layers(m) * rows * slots * m.num_kv_heads * m.head_dim // tensor
    layers = m.num_layers - num_attention_layers(m)
    states = layers * recurrent.state_bytes(m, rows, tensor) if layers else 0
    return numbers * jnp.dtype(m.dtype).itemsize + states


def empty_cache(m: ModelConfig, rows: int, slots: int) -> Cache:
    """Return this device's shard of a cache of zeros."""
    shape = (rows, slots, m.num_kv_heads // lax.axis_size(TENSOR), m.head_dim)
    has_state = [kind in RECURRENT for kind in kinds(m)]
    zeros = lambda: tuple(None if state else jnp.zeros(shape, m.dtype) for state in has_state)  # noqa: E731
    states = tuple(recurrent.empty_state(m, rows) if state else None for state in has_state)
    return Cache(zeros(), zeros(), states)


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
    weights: Tree, tokens: jax.Array, position: jax.Array, cache: Cache, cfg: Config
) -> tuple[jax.Array, Cache]:
    """Run the decoder on one more token of each row.

    Args:     tokens: int32 [B, 1]. position: int32 [B], of the tokens. weights, cache: as in
              `prompt`.
    Returns, Communication: as `prompt`, with T = 1.
    """
    return _through(weights, tokens, position, cache, cfg, None)


def logits(weights: Tree, h: jax.Array) -> jax.Array:
    """Compute logits: [B, D] -> float32 [B, V], complete on each device.

    Communication: an all-gather over TENSOR.
    """
    local = jnp.dot(h, weights["top"]["head"], preferred_element_type=jnp.float32)
    return lax.all_gather(local, TENSOR, axis=1, tiled=True)


def _through(weights, tokens, first, cache: Cache, cfg: Config, lengths: jax.Array | None):
    """Run all layers. With `lengths`, tokens see only each other, so the cache is not read."""
    B, T = tokens.shape
    positions = first[:, None] + jnp.arange(T, dtype=jnp.int32)
    batch = Batch(tokens, tokens, jnp.ones_like(tokens), positions)
    described = attention_context(batch, cfg, max_segments=1, length=cache.slots)
    x = _embed(weights["top"], tokens, cfg.model)
    (chunk,) = weights["layers"]
    contexts = [
        of_these
        for alike, of_these in transformer.runs_of_layers(chunk, described, cfg)
        for _ in alike
    ]
    keys, values, states = list(cache.keys), list(cache.values), list(cache.states)
    for i, (w, kind) in enumerate(zip(chunk, contexts, strict=True)):
        if states[i] is None:
            held = keys[i], values[i]
            x, (keys[i], values[i]) = _attend_here(
                x, w, kind, held, first, cfg, lengths is not None
            )
        else:
            x, states[i] = _recur(x, w, positions, states[i], cfg.model, lengths)
        x = _feed_forward(x, w, kind, cfg)
    h = norm.norm(x, weights["top"]["final_norm"], cfg.model)
    return h, Cache(tuple(keys), tuple(values), tuple(states))


def _embed(top: Tree, tokens: jax.Array, m: ModelConfig) -> jax.Array:
    rows = embedding.embedding_lookup(top["embed"], tokens, top["embed"].shape[0], m.dtype)
    x = lax.psum(rows, TENSOR)
    return x * math.sqrt(m.d_model) if m.embed_scale else x


def _attend_here(x, w: Tree, context: AttentionContext, held, first, cfg: Config, alone: bool):
    """Add the layer's attention to x. `alone`: new tokens see only each other."""
    m = cfg.model
    branch, _ = branches(w)
    h = _normalized(x, w, branch.norm, m)
    q, k, v = qkv(h, w, m)
    q, k = positioned(q, k, w, context.rope, m)
    held = _write(held[0], k, first), _write(held[1], v, first)
    if alone:
        out = _attend(q, k, v, context.mask, w, m, m.attention_backend)
    else:
        slots = jnp.arange(held[0].shape[1], dtype=jnp.int32)
        slots = jnp.broadcast_to(slots, held[0].shape[:2])
        mask = dataclasses.replace(
            context.mask, kv_positions=slots, q_segments=None, kv_segments=None, in_order=False
        )
        out = _attend(q, held[0], held[1], mask, w, m, "reference")
    side_by_side = gated(out.reshape(*out.shape[:2], -1), Shards((h,)), w)
    partial = row_parallel(side_by_side, w, "wo", "attn_out")
    return branch.add(x, lax.psum(partial, TENSOR), w, m), held


def _recur(x, w: Tree, positions, held, m: ModelConfig, lengths: jax.Array | None):
    """Add the layer's recurrence to x. With `lengths`, of complete prompts."""
    branch, _ = branches(w)
    h = _normalized(x, w, branch.norm, m)
    if lengths is None:
        out, held = recurrent.token(h, w, positions, held, m)
    else:
        out, held = recurrent.prompt(h, w, positions, lengths, m)
    partial = row_parallel(out, w, "delta_out", "attn_out")
    return branch.add(x, lax.psum(partial, TENSOR), w, m), held


def _feed_forward(x, w: Tree, context: AttentionContext, cfg: Config):
    """Add the layer's feed-forward branch to x."""
    _, branch = branches(w)
    whole = Shards((_normalized(x, w, branch.norm, cfg.model),))
    (partial,) = branch.compute(whole, w, context, execution_of(cfg)).parts
    return branch.add(x, lax.psum(partial, TENSOR), w, cfg.model)


def _normalized(x: jax.Array, w: Tree, name: str, m: ModelConfig) -> NormOutput:
    return NormOutput(norm.norm(x, w[name], m) if m.pre_norms else x)


def _attend(q, k, v, mask, w: Tree, m: ModelConfig, backend: str) -> jax.Array:
    if function := registry.function("model.attention", m.attention):
        return function(q, k, v, mask)
    return attention(q, k, v, mask, sinks=w.get("sinks"), backend=backend)[0]


def _write(held: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """Write [B, T, G, K] into the slots that start at each row's `first`."""
    put = lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, 0)  # noqa: E731
    return jax.vmap(put)(held, new, first)
