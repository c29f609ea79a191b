"""One layer of the decoder: attention and feed-forward on local shards, between residual streams.

Shape letters as in `sharding/axes.py`; B is a device's rows, H, G and F one tensor rank's part.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxpar.config import Config, ModelConfig, registry
from jaxpar.execution.decisions import (
    in_pieces,
    norms_are_scaled_later,
    norms_stay_unwritten,
)
from jaxpar.execution.remat import named
from jaxpar.kernels.norm import Normed, Unscaled
from jaxpar.model import activation, linear, moe
from jaxpar.model import norm as model_norm
from jaxpar.model import rope as model_rope
from jaxpar.model.token_context import Tokens
from jaxpar.parallel.context import context_attention
from jaxpar.parallel.gradient_buffers import for_use
from jaxpar.parallel.tensor.sequence import (
    gather_sequence,
    into_sequence_pieces,
    scatter_sequence,
    sequence_in_order,
    sequence_pieces,
    sum_of_sequence_pieces,
)

type Tree = dict[str, Any]

#: A norm's output, as a matmul takes it.
type Normalised = jax.Array | Normed | Unscaled

#: In pieces of the sequence: whole, or each tensor rank's shard (this one's first).
type Pieces = tuple[Normalised, ...]


def layer(x: jax.Array, w: Tree, tokens: Tokens, cfg: Config) -> jax.Array:
    """One pre-norm block on the local shard: attention, then feed-forward.

    Where `in_pieces`, all matmuls take one tensor rank's shard of the sequence at a time, so that
    another is on its way meanwhile; attention alone has them side by side.

    Args:     x: [B, T/(sequence*tensor), D]. w: the layer's view, whole over FSDP_AXES.
    Returns:  the same shape.
    Communication: two gathers and two scatters over TENSOR (`sequence_pieces`, its transpose),
              the same in the backward; what `context_attention` sends over SEQUENCE.
    Source:   Wang et al. 2023 (ASPLOS, "Overlap communication with dependent computation via
              decomposition"): a collective taken apart by the matmuls that need it.
    """
    with jax.named_scope("attention"):
        x, hs = normed_pieces(x, w, "attn_norm", cfg)
        out = sum_of_sequence_pieces(attend(hs, w, tokens, cfg))
        x = named(add_to_residual(x, out, w, "attn", cfg), "attn_residual")
    with jax.named_scope("feed_forward"):
        x, hs = normed_pieces(x, w, "mlp_norm", cfg)
        parts = tuple(feed_forward(h, for_use(w, i), cfg) for i, h in enumerate(hs))
        return add_to_residual(x, sum_of_sequence_pieces(parts), w, "mlp", cfg)


def normed_pieces(x: jax.Array, w: Tree, name: str, cfg: Config) -> tuple[jax.Array, Pieces]:
    """x, and the normalised input of attention or feed-forward: `sequence_pieces`, or whole."""
    if norms_are_scaled_later(cfg):
        x, unscaled = model_norm.norm_unscaled(x, w[name], cfg.model)
        return x, (Unscaled(named(unscaled.values, name), unscaled.scale),)
    x, h = model_norm.norm_beside(x, w[name], cfg.model)
    if norms_stay_unwritten(cfg):
        return x, (h,)
    whole = h.whole()
    pieces = sequence_pieces(whole) if in_pieces(cfg) else (gather_sequence(whole),)
    return x, tuple(named(piece, name) for piece in pieces)


def attend(hs: Pieces, w: Tree, tokens: Tokens, cfg: Config) -> tuple[jax.Array, ...]:
    """Attention of normalised inputs: this tensor rank's part of a sum, in as many pieces."""
    outs = into_sequence_pieces(attention_heads(hs, w, tokens, cfg), len(hs))
    return tuple(
        linear.to_residual(out, for_use(w, i), "wo", "attn_out") for i, out in enumerate(outs)
    )


def feed_forward(h: Normalised, w: Tree, cfg: Config) -> jax.Array:
    """The feed-forward of normalised inputs: this tensor rank's part of a sum, the same shape."""
    if cfg.model.num_experts:
        assert isinstance(h, jax.Array)  # experts multiply in the compute dtype
        return moe.feed_forward(h, w, cfg.model)
    if "w_gate_up" in w:
        values, scale = (h.values, h.scale) if isinstance(h, Unscaled) else (h, None)
        hidden = activation.gated_in_one(named(linear.gate_beside_up(values, w), "gate_up"), scale)
    else:
        assert not isinstance(h, Unscaled)  # `norms_are_scaled_later` where gate and up are one
        gate, up = (named(a, "gate_up") for a in linear.gate_and_up(h, w))
        hidden = activation.gated(gate, up, cfg.model)
    hidden = named(hidden, "mlp_hidden")
    return linear.to_residual(hidden, w, "w_down", "mlp_hidden")


def attention_heads(hs: Pieces, w: Tree, tokens: Tokens, cfg: Config) -> jax.Array:
    """Pieces of [B, T/sequence, D] -> the heads' outputs, [B, T/sequence, H*K/tensor]."""
    m = cfg.model
    parts = [linear.project_qkv(h, for_use(w, i), m) for i, h in enumerate(hs)]
    whole = [sequence_in_order(part) for part in zip(*parts, strict=True)]
    q, k, v = turned(whole, w, tokens.rope, m)
    kind, backend = cfg.parallel.context, m.attention_backend
    exact, function = m.attention_deterministic, registry.function("model.attention", m.attention)
    out = context_attention(
        q, k, v, tokens.mask, kind=kind, backend=backend, deterministic=exact, function=function
    )
    return out.reshape(*out.shape[:2], -1)


def turned(
    qkv: Sequence[jax.Array], w: Tree, rope: tuple[jax.Array, jax.Array], m: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What attention is given of projections, [B, T, heads/tensor, K]: turned by position."""
    q, k, v = (named(a, "qkv") for a in qkv)
    if m.qk_norm:
        q, k = model_norm.norm(q, w["q_norm"], m), model_norm.norm(k, w["k_norm"], m)
    if m.query_scale_dim is not None:
        q = q * math.sqrt(m.head_dim / m.query_scale_dim)
    q, k = (named(model_rope.rope(a, rope), "qk") for a in (q, k))
    return q, k, v


#: Of what attention and feed-forward add to the residual stream: its bias and its norm.
_OUTPUTS = {"attn": ("bo", "attn_post_norm"), "mlp": ("b_down", "mlp_post_norm")}


def add_output(x: jax.Array, partial: jax.Array, w: Tree, part: str, cfg: Config) -> jax.Array:
    """The residual stream plus a row-parallel matmul's partial sums (and its bias, once)."""
    return add_to_residual(x, scatter_sequence(partial), w, part, cfg)


def add_to_residual(x: jax.Array, out: jax.Array, w: Tree, part: str, cfg: Config) -> jax.Array:
    """x plus what attention ("attn") or feed-forward ("mlp") made, once it is summed."""
    bias, norm = _OUTPUTS[part]
    out = linear.add_bias(out, w.get(bias))
    return x + (model_norm.norm(out, w[norm], cfg.model) if cfg.model.post_norms else _alone(out))


@jax.custom_vjp
def _alone(out: jax.Array) -> jax.Array:
    """A matmul's result, added to x by what comes next, the norm of the sum, in the pass that reads
    it. XLA would have the matmul add it, in x's place, and so copy x first, for the backward."""
    return lax.optimization_barrier(out)


_alone.defvjp(lambda out: (_alone(out), None), lambda _, g: (g,))
