"""The decoder with a KV cache: complete prompts first, then one token at a time.

Runs on a mesh with only the tensor axis. Each rank holds the complete residual stream, not a shard
of the sequence as in training, because a step may have a single token. The key at position s of a
row is in slot s of the cache. A slot that is not yet written, or holds padding after a shorter
prompt, is in the future of all queries, so the causal mask hides it.

LongRoPE has short divisors for texts of up to `original_max_position` tokens, and long ones for
longer texts. A row's divisors are those of its present length. When they change, whoever calls
`step` has to call `prompt` again.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.model import Layer
from jaxpar.config import Config, Model
from jaxpar.execution.decisions import execution_of
from jaxpar.kernels.norm import NormOutput
from jaxpar.model import embedding, norm, transformer
from jaxpar.model.attention_context import (
    AttentionContext,
    Contexts,
    attention_context,
    context_of_layer,
)
from jaxpar.model.held import HeldSize, NewTokens
from jaxpar.model.layer import branches, computation
from jaxpar.model.loss import softcapped
from jaxpar.sharding.axes import TENSOR
from jaxpar.sharding.batch import Batch

type Tree = dict[str, Any]


@flax.struct.dataclass
class Cache:
    """What each layer holds of the text so far."""

    held: tuple[Any, ...]
    """Of each layer, what its mixer holds: keys and values, or a state. None without a mixer."""
    slots: int = flax.struct.field(pytree_node=False)
    """S: tokens for which keys and values have room."""


def cache_specs(layers: Sequence[Layer], slots: int) -> Cache:
    """Return how the arrays of a cache of some layers are split over a mesh."""
    mixers = [layer.mixer for layer in layers]
    return Cache(tuple(mixer and computation(mixer).held_specs for mixer in mixers), slots)


def cache_bytes(
    cfg: Config, rows: int, slots: int, tensor: int = 1, *, layers: Sequence[Layer] = ()
) -> int:
    """Return the bytes of the cache on one device. Args:     layers: as of `empty_cache`.

    Keys and values are 2 B S G K / tensor numbers for each layer with attention. In latent
    attention, B S (Rkv + R). The states of recurrent layers do not depend on S.
    """
    held = jax.eval_shape(lambda: _empty(cfg, rows, slots, tensor, layers))
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(held))


def empty_cache(cfg: Config, rows: int, slots: int, *, layers: Sequence[Layer] = ()) -> Cache:
    """Return this device's shard of a cache of zeros. Args:     layers: (): those of the model."""
    return _empty(cfg, rows, slots, lax.axis_size(TENSOR), layers)


def _empty(cfg: Config, rows: int, slots: int, tensor: int, layers: Sequence[Layer]) -> Cache:
    model = cfg.model
    size = HeldSize(rows, slots, tensor, jnp.dtype(cfg.compute.dtype), model)
    mixers = [layer.mixer for layer in layers or model.layers]
    return Cache(tuple(mixer and computation(mixer).held(mixer, size) for mixer in mixers), slots)


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


def logits(weights: Tree, h: jax.Array, m: Model) -> jax.Array:
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
    x = embed(weights["top"], tokens, positions, cfg)
    (chunk,) = weights["layers"]
    held, new = list(cache.held), NewTokens(first, positions, lengths)
    for i, (w, of) in enumerate(zip(chunk, cfg.model.layers, strict=True)):
        x, held[i] = layer(x, w, context_of_layer(described, of), held[i], new, cfg)
    h = transformer.before_logits(weights["top"], x, cfg.model)
    return h, Cache(tuple(held), cache.slots)


def layer(
    x: jax.Array, w: Tree, context: AttentionContext, held: Any, new: NewTokens, cfg: Config
) -> tuple[jax.Array, Any]:
    """Run one layer on new tokens of each row.

    Args:     x: [B, T, D]. w: fused. held: of the layer, from `Cache.held`.
    Returns:  (x, held).
    Communication: an all-reduce over TENSOR for each branch.
    """
    m, before = cfg.model, x
    for branch in branches(context.layer, m):
        stream = before if context.layer.parallel else x
        h = NormOutput(norm.named_norm(stream, w, branch.norm, m) if branch.norm in w else stream)
        if branch.role == "mixer":
            partial, held = branch.decode(h, w, context, held, new, cfg)
        else:
            partial = branch.decode(h, w, context, execution_of(cfg))
        out = branch.normalized(lax.psum(partial, TENSOR), w, m)
        x = branch.add(x, out, w, m)
    return x, held


def context_of(
    tokens: jax.Array, first: jax.Array, lengths: jax.Array, slots: int, cfg: Config
) -> tuple[jax.Array, Contexts]:
    """Return the positions and the attention context of new tokens, int32 [B, T].

    Args:     lengths: int32 [B], tokens of each row's text, with these.
    """

    positions = _positions(first, tokens.shape[1])
    batch = Batch(tokens, tokens, jnp.ones_like(tokens), positions)
    described = attention_context(batch, cfg, max_segments=1, length=slots, lengths=lengths)
    return positions, described


def last_of_short_angles(m: Model) -> int | None:
    """Return after how many tokens of a text LongRoPE's angles are others; None without it."""
    ropes = (getattr(layer.mixer, "rope", None) for layer in m.layers)
    scalings = (rope.scaling for rope in ropes if rope is not None and rope.scaling is not None)
    return next((s.original_max_position for s in scalings if s.kind == "longrope"), None)


def _positions(first: jax.Array, count: int) -> jax.Array:
    return first[:, None] + jnp.arange(count, dtype=jnp.int32)


def embed(top: Tree, tokens: jax.Array, positions: jax.Array, cfg: Config) -> jax.Array:
    """Compute the residual stream before the first layer, [B, T, D].

    Communication: an all-reduce over TENSOR.
    """
    m, dtype = cfg.model, cfg.compute.dtype
    look_up = lambda table, rows: embedding.embedding_lookup(table, rows, len(table), dtype)  # noqa: E731
    x = embedding.scaled(lax.psum(look_up(top["embed"], tokens), TENSOR), m)
    if m.max_positions:
        x += lax.psum(look_up(top["positions"], positions), TENSOR)
    return x
