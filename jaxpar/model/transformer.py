"""The decoder, dense or with experts: its parameters, and three parts as functions of local shards.

    embed   tokens -> residual stream, the vocabulary split over VOCAB_AXES
    stage   residual stream -> residual stream, through some of the layers
    head    residual stream and labels -> summed loss

They compute with weights as `views.view` arranges them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.axes import FSDP_AXES
from jaxpar.batch import Batch
from jaxpar.config import Config, LoraConfig, ModelConfig
from jaxpar.kernels import float8
from jaxpar.memory_rules import names_on_host, saved_names
from jaxpar.model import layers, lora
from jaxpar.model.block import Tokens, in_groups, layer, layer_in_turns, uses_of_weights
from jaxpar.model.loss import cross_entropy, num_chunks
from jaxpar.model.remat import all_on_device, rematerialize
from jaxpar.model.views import LAYER_DIMS, PROJECTIONS, TOP_DIMS
from jaxpar.parallel import fsdp
from jaxpar.parallel.collectives import (
    broadcast_from_last_stage,
    gather_sequence,
    scatter_sequence,
    sum_over_stages,
    varying,
)
from jaxpar.parallel.float32_gradients import closed, of_gradients, opened, opened_again
from jaxpar.parallel.prefetch import through_layers
from jaxpar.params import ParamSpec, split

type Tree = dict[str, Any]

#: Names that are saved -> a layer.
type Rematerialized = Callable[[tuple[str, ...]], Callable[..., Any]]


def param_specs(m: ModelConfig, adapters: LoraConfig | None = None) -> Tree:
    """Every parameter of the model: shape, logical axes, initial distribution.

    Weights start normal with `init_std`; the two matrices that write to the residual stream with
    init_std / sqrt(2 L), so that its variance does not grow with depth (GPT-2, section 2.3).

    Args:     adapters: of these (`Config.lora`) too, if there are any. None: the model alone.
    """
    D, H, G, K, F = m.d_model, m.num_heads, m.num_kv_heads, m.head_dim, m.d_ff
    deep = m.init_std / math.sqrt(2 * m.num_layers)

    def matrix(shape, axes, std=m.init_std):
        return ParamSpec(shape=(m.num_layers, *shape), axes=("layer", *axes), std=std)

    def vector(shape, axes, init):
        shape, axes = (m.num_layers, *shape), ("layer", *axes)
        return ParamSpec(shape=shape, axes=axes, init=init, decay=False)

    def gain(shape, axes):
        return vector(shape, axes, init_of_gains(m))

    blocks: Tree = {
        "attn_norm": gain((D,), ("norm",)),
        "wq": matrix((D, H, K), ("embed", "heads", "head_dim")),
        "wk": matrix((D, G, K), ("embed", "kv_heads", "head_dim")),
        "wv": matrix((D, G, K), ("embed", "kv_heads", "head_dim")),
        "wo": matrix((H, K, D), ("heads", "head_dim", "embed"), deep),
        "mlp_norm": gain((D,), ("norm",)),
    }
    if m.num_experts:
        E = m.num_experts
        blocks["router"] = matrix((D, E), ("embed", "experts"))
        blocks |= {n: matrix((E, D, F), ("experts", "embed", "mlp")) for n in ("w_gate", "w_up")}
        blocks["w_down"] = matrix((E, F, D), ("experts", "mlp", "embed"), deep)
    else:
        blocks |= {n: matrix((D, F), ("embed", "mlp")) for n in ("w_gate", "w_up")}
        blocks["w_down"] = matrix((F, D), ("mlp", "embed"), deep)
    if m.qk_norm:
        blocks |= {name: gain((K,), ("head_dim",)) for name in ("q_norm", "k_norm")}
    if m.post_norms:
        blocks |= {n: gain((D,), ("norm",)) for n in ("attn_post_norm", "mlp_post_norm")}
    if m.qkv_bias:
        blocks["bq"] = vector((H, K), ("heads", "head_dim"), "zeros")
        blocks |= {n: vector((G, K), ("kv_heads", "head_dim"), "zeros") for n in ("bk", "bv")}
    if m.out_bias:
        blocks["bo"] = vector((D,), ("norm",), "zeros")
    if m.mlp_bias:
        blocks |= {n: vector((F,), ("mlp",), "zeros") for n in ("b_gate", "b_up")}
        blocks["b_down"] = vector((D,), ("norm",), "zeros")
    specs = blocks_with_top(m, blocks)
    return lora.with_adapters(specs, adapters) if adapters and adapters.rank else specs


def trained_specs(cfg: Config) -> Tree:
    """Those of them that training moves: all, or the adapters."""
    specs = param_specs(cfg.model, cfg.lora)
    return split(specs, specs)[0]


def init_of_gains(m: ModelConfig) -> Literal["ones", "zeros"]:
    """How the parameters of norms start: the gain is 1."""
    return "zeros" if m.norm_offset else "ones"


def blocks_with_top(m: ModelConfig, blocks: Tree) -> Tree:
    """The layers' specs, with the embedding, the final norm and (untied) the head."""
    std = m.init_std
    table = ParamSpec(shape=(m.vocab_size, m.d_model), axes=("vocab", "embed"), std=std)
    norm = ParamSpec(shape=(m.d_model,), axes=("norm",), init=init_of_gains(m), decay=False)
    specs = {"embed": table, "layers": blocks, "final_norm": norm}
    if not m.tie_embeddings:
        shape = (m.d_model, m.vocab_size)
        specs["head"] = ParamSpec(shape=shape, axes=("embed", "vocab"), std=std)
    return specs


# --------------------------------------------------------------------------- the three parts


@jax.named_scope("embedding")
def embed(top: Tree, batch: Batch, cfg: Config) -> jax.Array:
    """The residual stream at the first layer, on every pipeline stage.

    Returns:  [B, T/(sequence*tensor), D], compute dtype.
    Communication: gather of the table (ZeRO-3); over TENSOR that of `scatter_sequence`; all-reduce
              over PIPELINE.
    """
    table = _whole({"embed": top["embed"]}, TOP_DIMS, cfg)["embed"]
    rows = layers.embedding_lookup(table, batch.tokens, table.shape[0], cfg.model.dtype)
    if cfg.model.embed_scale:
        rows = rows * math.sqrt(cfg.model.d_model)
    return sum_over_stages(scatter_sequence(varying(rows)))


def stage(
    chunk: Any, x: jax.Array, tokens: Tokens, beside: Tree, cfg: Config, layers_of: Rematerialized
) -> tuple[jax.Array, Tree]:
    """The residual stream through one chunk of layers (a tuple of trees, or one stacked tree).

    Args:     beside: weights for later; unrolled layers have time for their gradients. layers_of:
              `rematerialized`, for unrolled layers.
    Returns:  as x; beside.
    """
    if isinstance(chunk, tuple):
        groups, blocks = cfg.parallel.row_groups, iter(_blocks(cfg, len(chunk), layers_of))
        cast = functools.partial(_cast, dims=LAYER_DIMS, cfg=cfg)
        gather = functools.partial(_whole, dims=LAYER_DIMS, cfg=cfg)
        scatter = functools.partial(_scattered, dims=LAYER_DIMS, cfg=cfg)
        sends = _gathers(cfg)
        rows = in_groups(x, groups)
        for alike, of_these in runs_of_layers(chunk, tokens, cfg):
            context = in_groups(of_these, groups)
            these = tuple(itertools.islice(blocks, len(alike)))
            rows, beside = through_layers(
                these, cast, gather, scatter, sends, alike, rows, beside, context
            )
        return (rows[0] if groups == 1 else jnp.concatenate(rows)), beside
    block = rematerialize(_block(cfg), saved_names(cfg.parallel.remat), apart=True)
    tokens = lax.stop_gradient(tokens)
    return lax.scan(lambda x, w: (block(x, w, tokens), None), x, chunk)[0], beside


def matmuls_add_up(cfg: Config) -> bool:
    """Whether matmuls add the gradients of a layer's matrices to float32 sums over microbatches.

    For that the matrices are whole on the device, multiplied as they are, and in a chunk whose
    sums have one place (`parallel/pipeline.py`).
    """
    p, m = cfg.parallel, cfg.model
    whole = p.zero == 1 and p.layer_loop == "unroll" and not cfg.lora.rank
    one_place = p.virtual_stages == 1 or not stage_sends(cfg)
    return whole and m.matmul_dtype == "compute" and one_place


def with_float32_gradients(chunk: Any, cfg: Config) -> Any:
    """A chunk of `stage` for gradients that are added up, where `matmuls_add_up`."""
    if not matmuls_add_up(cfg):
        return chunk
    names = ("wqkv", "wo") if cfg.model.num_experts else tuple(PROJECTIONS)
    return tuple(opened(w, names, uses_of_weights(cfg)) for w in chunk)


def _gathers(cfg: Config) -> bool:
    """Whether a layer's weights come from other devices, and its gradients go there."""
    p = cfg.parallel
    return p.zero == 3 and p.data * p.expert * p.sequence > 1


def stage_sends(cfg: Config) -> bool:
    """Whether all pipeline stages come to what `stage` sends.

    To permutes of keys and values they must, and they do to gathers of weights. Over tensor only
    the devices of one stage do, where there are stages (`direct.gather_within`).

    Args:     cfg: resolved.
    """
    return _gathers(cfg) or cfg.parallel.sequence > 1


def layers_in_part(cfg: Config) -> int:
    """How many layers `stage` is given at a time: one, or as many as repeat where not all are
    alike. 0, a chunk at once: for weights gathered a layer ahead and values fetched a layer ahead,
    for rows in turns, whose groups meet nowhere within a chunk, and in a loop over stacked layers.

    Args:     cfg: resolved.
    """
    p = cfg.parallel
    ahead = stage_sends(cfg) or names_on_host(p.remat)
    return 0 if ahead or p.row_groups > 1 or p.layer_loop == "scan" else cfg.model.global_every or 1


def runs_of_layers(chunk: tuple, tokens: Tokens, cfg: Config) -> list[tuple[tuple, Tokens]]:
    """The layers of a chunk, cut where those with a window and those without meet.

    Every chunk begins with the same kind of layer (`validation.py` sees to it), so the number of a
    layer within its chunk says what it is.

    Returns:  neighbouring layers that are alike, with what they know of the tokens.
    """
    if not cfg.model.global_every:
        return [(chunk, tokens)]
    runs: list[tuple[tuple, Tokens]] = []
    for is_global, group in itertools.groupby(
        enumerate(chunk), lambda at: (at[0] + 1) % cfg.model.global_every == 0
    ):
        alike = tuple(w for _, w in group)
        assert tokens.in_global is not None
        local = dataclasses.replace(tokens, in_global=None)
        runs.append((alike, tokens.in_global if is_global else local))
    return runs


@jax.named_scope("loss")
def head(top: Tree, x: jax.Array, batch: Batch, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """Summed loss of a microbatch, from the last stage's residual stream.

    Args:     x: [B, T/(sequence*tensor), D], read on the last pipeline stage.
    Returns:  (loss with z-loss, loss), as `cross_entropy`.
    Communication: broadcast over PIPELINE; gather over TENSOR; those of `cross_entropy`.
    """
    x = layers.norm(x, top["final_norm"], cfg.model)
    h = gather_sequence(broadcast_from_last_stage(x))
    w = _whole({"head": top["head"]}, TOP_DIMS, cfg)["head"]
    labels, chunks = batch.labels.ravel(), cfg.parallel.loss_chunks
    chunks = num_chunks(len(labels), w.shape[1], chunks)
    if chunks > 1 or w.dtype == jnp.float16 or lax.axis_size(FSDP_AXES) > 1:
        # For its transpose: the layers' backward waits until the head's gradient is cast, and on
        # its way. XLA would put the cast off to the end, and keep the gradient in float32
        # meanwhile. One chunk's is cast by its matmul, and what reads it scales it.
        h, w = lax.optimization_barrier((h, w))
    logits = jnp.float32 if cfg.model.logits_dtype == "float32" else w.dtype
    flat = h.reshape(-1, h.shape[-1]), w, labels
    return cross_entropy(*flat, cfg.train.z_loss, logits, chunks)


def logits_at(weights: Tree, batch: Batch, tokens: Tokens, last: jax.Array, cfg: Config):
    """Logits of the token after position `last`, for sampling on a mesh without stages.

    Args:     weights: the `view`. batch: [B, T]; labels are not read. last: int32 scalar.
    Returns:  float32 [B, V/tensor].
    """
    top = weights["top"]
    (chunk,) = weights["layers"]
    x, _ = stage(chunk, embed(top, batch, cfg), tokens, {}, cfg, rematerialized(cfg))
    h = gather_sequence(layers.norm(x, top["final_norm"], cfg.model))
    row = lax.dynamic_index_in_dim(h, last, axis=1, keepdims=False)
    w = _whole({"head": top["head"]}, TOP_DIMS, cfg)["head"]
    return jnp.dot(row, w, preferred_element_type=jnp.float32)


def _cast(w: Tree, dims: dict[str, int | None], cfg: Config) -> Tree:
    """Shards that `_whole` gathers, as they travel; the others as they are.

    Not in a loop over microbatches: it is given float32 slices, and casts would come beside them.
    """
    m, p = cfg.model, cfg.parallel
    if p.zero == 1 or p.num_microbatches > 1:
        return closed(w)
    scales = w["scales"] if p.gather_dtype == "float8" else {}

    def cast(n: str, a: jax.Array) -> jax.Array:
        if n in scales:
            return fsdp.rounded_shard(a, scales[n], m.dtype)
        return a if dims.get(n) is None else a.astype(m.dtype)

    return {n: cast(n, a) for n, a in w.items()}


def _whole(w: Tree, dims: dict[str, int | None], cfg: Config) -> Tree:
    """Weights ready to multiply by: gathered here (ZeRO-3), or once before the step (ZeRO-1).

    Those with a scale beside them come as `float8.Weight`, rounded before the gather or after it.
    """
    m, p, w = cfg.model, cfg.parallel, opened_again(w)
    scales, shards = w.pop("scales", {}), w
    if p.gather_dtype == "float8":
        w = {n: a for n, a in w.items() if n not in scales}
    if p.zero == 3:
        w = fsdp.gather_tree(w, dims, m.dtype, p.grad_reduce)
    for n, scale in scales.items():
        dim = PROJECTIONS[n]
        if p.gather_dtype == "float8":
            values, like = fsdp.gather_float8(shards[n], scale, dim, m.dtype, p.grad_reduce)
            w[n] = float8.Weight(values, scale, like, m.float8_scaling, dim)
        else:
            w[n] = float8.quantize_weight(w[n], scale, m.float8_scaling, dim)
    return w


def _scattered(grads: Tree, dims: dict[str, int | None], cfg: Config) -> Tree:
    """The transpose of `_whole`; scales have no gradient, nor what adapters lie beside."""
    rounded = {n: g.gradient for n, g in grads.items() if isinstance(g, float8.Weight)}
    grads = grads | rounded
    still = {n: None for n in grads if cfg.lora.rank and not lora.is_adapter(n)}
    grads = {n: g for n, g in grads.items() if n not in still}
    if cfg.parallel.zero == 3:
        grads = fsdp.scatter_tree(grads, dims, cfg.parallel.grad_reduce)
    return of_gradients(grads) | still | ({"scales": None} if rounded else {})


def _layer(cfg: Config, xs: tuple, w: Tree, tokens: tuple) -> tuple[jax.Array, ...]:
    w = lora.held_still(w)
    if len(xs) == 1:
        return (layer(xs[0], w, tokens[0], cfg),)
    return layer_in_turns(xs, w, tokens, cfg)


def rematerialized(cfg: Config) -> Rematerialized:
    """A layer as a function of whole weights, by the names that it saves: for each the same one,
    wherever in a step it is used, so that JAX traces it and lowers its kernels once."""
    in_ring = cfg.parallel.pipeline > 1 and cfg.parallel.pipeline_save == "residuals"
    layer = functools.partial(_layer, cfg)
    return functools.cache(lambda names: rematerialize(layer, names, apart=in_ring))


def _blocks(cfg: Config, count: int, layer_that_saves: Rematerialized) -> list[Callable[..., Any]]:
    """The layers of a chunk, as functions of whole weights."""
    p, names = cfg.parallel, saved_names(cfg.parallel.remat)
    blocks = [layer_that_saves(names)] * count
    if p.pipeline == 1 and names_on_host(p.remat):
        # Its backward is next: its values would be fetched at once, with no work to hide it.
        blocks[-1] = layer_that_saves(all_on_device(names))
    return blocks


def _block(cfg: Config):
    """`layer` of one device's weights; gathering them is part of what is recomputed."""

    def block(x: jax.Array, w: Tree, tokens: Tokens) -> jax.Array:
        return layer(x, lora.held_still(_whole(w, LAYER_DIMS, cfg)), tokens, cfg)

    return block
