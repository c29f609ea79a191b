"""The decoder with a cache of keys and values: whole prompts first, then a token at a time.

On a mesh of tensor ranks alone. The residual stream is whole on each of them, not cut along the
sequence as in training: there may be one token. A row's key of position s lies in slot s, so what a
slot holds before its token came (padding after a shorter prompt) is hidden by being in the future.
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config, ModelConfig, registry
from jaxpar.execution.decisions import execution_of
from jaxpar.kernels.attention import attention
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import embedding, norm, transformer
from jaxpar.model.attention import positioned, qkv
from jaxpar.model.attention_context import AttentionContext, attention_context
from jaxpar.model.layer import branches
from jaxpar.model.linear import row_parallel
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import TENSOR
from jaxpar.sharding.batch import Batch

type Tree = dict[str, Any]


@flax.struct.dataclass
class Cache:
    """Keys and values of each layer, [B, S, G/tensor, K] in the compute dtype."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def cache_bytes(m: ModelConfig, rows: int, slots: int, tensor: int = 1) -> int:
    """Bytes of the cache on one device: keys and values, 2 L B S G K / tensor numbers."""
    numbers = 2 * m.num_layers * rows * slots * m.num_kv_heads * m.head_dim // tensor
    return numbers * jnp.dtype(m.dtype).itemsize


def empty_cache(m: ModelConfig, rows: int, slots: int) -> Cache:
    """This device's part of a cache of zeros."""
    shape = (rows, slots, m.num_kv_heads // lax.axis_size(TENSOR), m.head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, m.dtype) for _ in range(m.num_layers))  # noqa: E731
    return Cache(zeros(), zeros())


def prompt(weights: Tree, tokens: jax.Array, cache: Cache, cfg: Config) -> tuple[jax.Array, Cache]:
    """Read prompts into an empty cache.

    Args:     weights: fused, in the compute dtype, one tree per layer. tokens: int32 [B, T],
              padded behind. cache: of at least T slots.
    Returns:  the last layer's output, normalized, [B, T, D]; the cache.
    Communication: two all-reduces over TENSOR a layer, and one for the embedding.
    """
    return _through(weights, tokens, jnp.zeros(len(tokens), jnp.int32), cache, cfg, alone=True)


def step(
    weights: Tree, tokens: jax.Array, position: jax.Array, cache: Cache, cfg: Config
) -> tuple[jax.Array, Cache]:
    """One token more in each row.

    Args:     tokens: int32 [B, 1]. position: int32 [B], theirs. weights, cache: as in `prompt`.
    Returns, Communication: as `prompt`, with T = 1.
    """
    return _through(weights, tokens, position, cache, cfg, alone=False)


def logits(weights: Tree, h: jax.Array) -> jax.Array:
    """[B, D] -> float32 [B, V], whole on each device.

    Communication: an all-gather over TENSOR.
    """
    local = jnp.dot(h, weights["top"]["head"], preferred_element_type=jnp.float32)
    return lax.all_gather(local, TENSOR, axis=1, tiled=True)


def _through(weights, tokens, first, cache: Cache, cfg: Config, *, alone: bool):
    """`alone`: the new tokens see each other and nothing else, so the cache need not be read."""
    B, T = tokens.shape
    positions = first[:, None] + jnp.arange(T, dtype=jnp.int32)
    batch = Batch(tokens, tokens, jnp.ones_like(tokens), positions)
    described = attention_context(batch, cfg, max_segments=1)
    x = _embed(weights["top"], tokens, cfg.model)
    (chunk,) = weights["layers"]
    kinds = [
        of_these
        for alike, of_these in transformer.runs_of_layers(chunk, described, cfg)
        for _ in alike
    ]
    keys, values = list(cache.keys), list(cache.values)
    for i, (w, kind) in enumerate(zip(chunk, kinds, strict=True)):
        held = keys[i], values[i]
        x, (keys[i], values[i]) = _layer(x, w, kind, held, first, cfg, alone)
    h = norm.norm(x, weights["top"]["final_norm"], cfg.model)
    return h, Cache(tuple(keys), tuple(values))


def _embed(top: Tree, tokens: jax.Array, m: ModelConfig) -> jax.Array:
    rows = embedding.embedding_lookup(top["embed"], tokens, top["embed"].shape[0], m.dtype)
    x = lax.psum(rows, TENSOR)
    return x * math.sqrt(m.d_model) if m.embed_scale else x


def _layer(x, w: Tree, context: AttentionContext, held, first, cfg: Config, alone: bool):
    m = cfg.model
    first_branch, second = branches(m)
    h = NormOutput(norm.norm(x, w[first_branch.norm], m))
    q, k, v = qkv(h, w, m)
    q, k = positioned(q, k, w, context.rope, m)
    held = _write(held[0], k, first), _write(held[1], v, first)
    if alone:
        out = _attend(q, k, v, context.mask, m, m.attention_backend)
    else:
        slots = jnp.arange(held[0].shape[1], dtype=jnp.int32)
        slots = jnp.broadcast_to(slots, held[0].shape[:2])
        mask = dataclasses.replace(
            context.mask, kv_positions=slots, q_segments=None, kv_segments=None, in_order=False
        )
        out = _attend(q, held[0], held[1], mask, m, "reference")
    partial = row_parallel(out.reshape(*out.shape[:2], -1), w, "wo", "attn_out")
    x = first_branch.add(x, lax.psum(partial, TENSOR), w, m)
    whole = Shards((NormOutput(norm.norm(x, w[second.norm], m)),))
    (partial,) = second.compute(whole, w, context, execution_of(cfg)).parts
    return second.add(x, lax.psum(partial, TENSOR), w, m), held


def _attend(q, k, v, mask, m: ModelConfig, backend: str) -> jax.Array:
    function = registry.function("model.attention", m.attention)
    return function(q, k, v, mask) if function else attention(q, k, v, mask, backend=backend)[0]


def _write(held: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """[B, T, G, K] into the slots from each row's `first` on."""
    put = lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, 0)  # noqa: E731
    return jax.vmap(put)(held, new, first)
