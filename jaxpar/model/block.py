"""One layer of the decoder: attention and feed-forward on local shards, between residual streams.

Shape letters as in `axes.py`; B is a device's rows, H, G and F one tensor rank's part.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar import extensions
from jaxpar.batch import Batch
from jaxpar.config import Config, ModelConfig
from jaxpar.kernels.attention import AttentionMask
from jaxpar.kernels.norm import Normed, Unscaled
from jaxpar.kernels.platform import Platform
from jaxpar.model import experts, layers
from jaxpar.model.remat import named
from jaxpar.model.views import gate_and_up_are_one
from jaxpar.parallel.collectives import (
    gather_sequence,
    into_sequence_pieces,
    scatter_sequence,
    sequence_in_order,
    sequence_pieces,
    sum_of_sequence_pieces,
)
from jaxpar.parallel.context import context_attention, mask_across
from jaxpar.parallel.float32_gradients import for_use

type Tree = dict[str, Any]

#: A norm's output, as a matmul takes it.
type Normalised = jax.Array | Normed | Unscaled

#: In pieces of the sequence: whole, or each tensor rank's shard (this one's first).
type Pieces = tuple[Normalised, ...]

#: Of a piece, for which matmuls of pieces are faster than one gather and one matmul. Two H200s, 8
#: layers of 8B: pieces of 4,096 tokens are 1% faster, of 2,048 4% slower (docs/LOG.md).
FEWEST_TOKENS = 4096


@flax.struct.dataclass
class Tokens:
    """What every layer knows of a microbatch: who attends to whom, and the rotary angles."""

    mask: AttentionMask
    rope: tuple[jax.Array, jax.Array]
    in_global: "Tokens | None" = None
    """The same for layers without a window, in a model where only some have one."""


def describe_tokens(batch: Batch, cfg: Config, max_segments: int | None) -> Tokens:
    """The mask and rotary tables of a microbatch, from its positions and segments."""
    m = cfg.model
    if not m.global_every:
        return _describe(batch, cfg, max_segments, m.sliding_window, m.rope_theta)
    local_theta = m.rope_theta if m.local_rope_theta is None else m.local_rope_theta
    local = _describe(batch, cfg, max_segments, m.sliding_window, local_theta)
    everywhere = _describe(batch, cfg, max_segments, None, m.rope_theta)
    return dataclasses.replace(local, in_global=everywhere)


def across_devices(tokens: Tokens, cfg: Config) -> Tokens:
    """With what layers must know of other devices' tokens: `mask_across`, once for all of them."""
    if tokens.in_global is not None:
        tokens = dataclasses.replace(tokens, in_global=across_devices(tokens.in_global, cfg))
    return dataclasses.replace(tokens, mask=mask_across(tokens.mask, cfg.parallel.context))


def _describe(
    batch: Batch, cfg: Config, max_segments: int | None, window: int | None, theta: float
) -> Tokens:
    segments = batch.segment_ids if cfg.data.document_mask else None
    in_order = cfg.parallel.sequence == 1 or cfg.parallel.context == "ulysses"
    mask = AttentionMask(
        q_positions=batch.positions,
        kv_positions=batch.positions,
        q_segments=segments,
        kv_segments=segments,
        window=window,
        max_segments=max_segments,
        in_order=in_order,
    )
    model = dataclasses.replace(cfg.model, rope_theta=theta)
    return Tokens(mask=mask, rope=layers.rope_tables(batch.positions, model))


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


def in_pieces(cfg: Config, on_gpu: bool | None = None) -> bool:
    """Whether matmuls take one tensor rank's shard of the sequence at a time: without stages and
    turns. On GPUs of FEWEST_TOKENS or more; elsewhere, where nothing is gained or lost, of any
    number, so that small tests take the path of large runs.

    Args:     cfg: resolved. on_gpu: if not given, whether the step is traced for one.
    """
    p = cfg.parallel
    if p.tensor == 1 or p.pipeline > 1 or p.row_groups > 1:
        return False
    on_gpu = Platform.here().name == "gpu" if on_gpu is None else on_gpu
    tokens = rows_on_device(cfg) * cfg.data.seq_len // (p.sequence * p.tensor)
    return not on_gpu or tokens >= FEWEST_TOKENS


def rows_on_device(cfg: Config) -> int:
    """B: sequences of a microbatch on one device. cfg: resolved."""
    p = cfg.parallel
    return cfg.train.global_batch_size // (p.replica * p.data * p.expert * p.num_microbatches)


def uses_of_weights(cfg: Config) -> int:
    """How many matmuls a layer's weight is in, forward: of groups of rows, or of pieces."""
    return cfg.parallel.tensor if in_pieces(cfg) else cfg.parallel.row_groups


def norms_stay_unwritten(cfg: Config) -> bool:
    """Whether all that reads a layer's normalised inputs are float8 matmuls on this device, with
    one scale per tensor: they compute them on the way."""
    rounded = cfg.model.matmul_dtype == "float8" and cfg.model.float8_scaling == "tensor"
    return rounded and cfg.parallel.tensor == 1 and not cfg.lora.rank


def norms_are_scaled_later(cfg: Config) -> bool:
    """Whether the rows of a layer's normalised inputs are scaled behind the matmuls: where these
    are in the compute dtype and on this device alone, and all that reads their products is one
    pass. Not in float16, whose range the unscaled products may leave."""
    m = cfg.model
    one_pass = gate_and_up_are_one(cfg) and not m.qkv_bias
    plain = m.matmul_dtype == "compute" and m.dtype != "float16"
    return one_pass and plain and cfg.parallel.tensor == 1


def normed_pieces(x: jax.Array, w: Tree, name: str, cfg: Config) -> tuple[jax.Array, Pieces]:
    """x, and the normalised input of attention or feed-forward: `sequence_pieces`, or whole."""
    if norms_are_scaled_later(cfg):
        x, unscaled = layers.norm_unscaled(x, w[name], cfg.model)
        return x, (Unscaled(named(unscaled.values, name), unscaled.scale),)
    x, h = layers.norm_beside(x, w[name], cfg.model)
    if norms_stay_unwritten(cfg):
        return x, (h,)
    whole = h.whole()
    pieces = sequence_pieces(whole) if in_pieces(cfg) else (gather_sequence(whole),)
    return x, tuple(named(piece, name) for piece in pieces)


def attend(hs: Pieces, w: Tree, tokens: Tokens, cfg: Config) -> tuple[jax.Array, ...]:
    """Attention of normalised inputs: this tensor rank's part of a sum, in as many pieces."""
    outs = into_sequence_pieces(attention_heads(hs, w, tokens, cfg), len(hs))
    return tuple(
        layers.to_residual(out, for_use(w, i), "wo", "attn_out") for i, out in enumerate(outs)
    )


def feed_forward(h: Normalised, w: Tree, cfg: Config) -> jax.Array:
    """The feed-forward of normalised inputs: this tensor rank's part of a sum, the same shape."""
    if cfg.model.num_experts:
        assert isinstance(h, jax.Array)  # experts multiply in the compute dtype
        return experts.feed_forward(h, w, cfg.model)
    if "w_gate_up" in w:
        values, scale = (h.values, h.scale) if isinstance(h, Unscaled) else (h, None)
        hidden = layers.gated_in_one(named(layers.gate_beside_up(values, w), "gate_up"), scale)
    else:
        assert not isinstance(h, Unscaled)  # `norms_are_scaled_later` where gate and up are one
        gate, up = (named(a, "gate_up") for a in layers.gate_and_up(h, w))
        hidden = layers.gated(gate, up, cfg.model)
    hidden = named(hidden, "mlp_hidden")
    return layers.to_residual(hidden, w, "w_down", "mlp_hidden")


def attention_heads(hs: Pieces, w: Tree, tokens: Tokens, cfg: Config) -> jax.Array:
    """Pieces of [B, T/sequence, D] -> the heads' outputs, [B, T/sequence, H*K/tensor]."""
    m = cfg.model
    parts = [layers.project_qkv(h, for_use(w, i), m) for i, h in enumerate(hs)]
    whole = [sequence_in_order(part) for part in zip(*parts, strict=True)]
    q, k, v = turned(whole, w, tokens.rope, m)
    kind, backend = cfg.parallel.context, m.attention_backend
    exact, function = m.attention_deterministic, extensions.function("model.attention", m.attention)
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
        q, k = layers.norm(q, w["q_norm"], m), layers.norm(k, w["k_norm"], m)
    if m.query_scale_dim is not None:
        q = q * math.sqrt(m.head_dim / m.query_scale_dim)
    q, k = (named(layers.rope(a, rope), "qk") for a in (q, k))
    return q, k, v


#: Of what attention and feed-forward add to the residual stream: its bias and its norm.
_OUTPUTS = {"attn": ("bo", "attn_post_norm"), "mlp": ("b_down", "mlp_post_norm")}


def _add_output(x: jax.Array, partial: jax.Array, w: Tree, part: str, cfg: Config) -> jax.Array:
    """The residual stream plus a row-parallel matmul's partial sums (and its bias, once)."""
    return add_to_residual(x, scatter_sequence(partial), w, part, cfg)


def add_to_residual(x: jax.Array, out: jax.Array, w: Tree, part: str, cfg: Config) -> jax.Array:
    """x plus what attention ("attn") or feed-forward ("mlp") made, once it is summed."""
    bias, norm = _OUTPUTS[part]
    out = layers.add_bias(out, w.get(bias))
    return x + (layers.norm(out, w[norm], cfg.model) if cfg.model.post_norms else _alone(out))


@jax.custom_vjp
def _alone(out: jax.Array) -> jax.Array:
    """A matmul's result, added to x by what comes next, the norm of the sum, in the pass that reads
    it. XLA would have the matmul add it, in x's place, and so copy x first, for the backward."""
    return lax.optimization_barrier(out)


_alone.defvjp(lambda out: (_alone(out), None), lambda _, g: (g,))


# ------------------------------------------------------------------------- groups of rows, in turns


def in_groups(tree: Any, groups: int) -> tuple[Any, ...]:
    """Arrays of [B, ...], cut into groups of rows."""
    cut = lambda i: jax.tree.map(lambda a: jnp.split(a, groups)[i], tree)  # noqa: E731
    return tuple(cut(i) for i in range(groups)) if groups > 1 else (tree,)


def layer_in_turns(
    xs: tuple[jax.Array, ...], w: Tree, tokens: tuple[Tokens, ...], cfg: Config
) -> tuple[jax.Array, ...]:
    """`layer` on groups of rows, one's communication over TENSOR beside another's computation.

    The groups take turns: all attend, then all feed forward. What the next turn needs must be
    there when a turn ends, so it is on its way meanwhile; the backward runs the turns, and the
    same rule, in reverse.

    Args:     xs: [B/groups, T/(sequence*tensor), D] each. tokens: of each.
    Returns:  as xs.
    Source:   Wang et al. 2024 (2409.15241), Domino: the split of the batch.
    """
    rows, n = list(xs), len(xs)
    uses = [for_use(w, i) for i in range(n)]
    partial: list[jax.Array] = []

    def input_of(turn: int) -> Pieces:
        i = turn % n
        with jax.named_scope("attention" if turn < n else "feed_forward"):
            if turn < n:
                rows[i], hs = normed_pieces(rows[i], w, "attn_norm", cfg)
                return hs
            rows[i] = named(_add_output(rows[i], partial[i], w, "attn", cfg), "attn_residual")
            rows[i], hs = normed_pieces(rows[i], w, "mlp_norm", cfg)
            return hs

    hs = input_of(0)
    for turn in range(2 * n):
        with jax.named_scope("attention" if turn < n else "feed_forward"):
            mine = uses[turn % n]
            if turn < n:
                (out,) = attend(hs, mine, tokens[turn], cfg)
            else:
                out = feed_forward(hs[0], mine, cfg)
        if turn + 1 < 2 * n:
            hs, out = lax.optimization_barrier((input_of(turn + 1), out))
        partial.append(out)
    with jax.named_scope("feed_forward"):
        return tuple(
            _add_output(x, out, w, "mlp", cfg) for x, out in zip(rows, partial[n:], strict=True)
        )
