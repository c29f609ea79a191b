"""The decoder, dense or with experts: three parts as functions of local shards.

    embed   tokens -> residual stream, with the vocabulary sharded over VOCAB_AXES
    stage   residual stream -> residual stream, through some of the layers
    head    residual stream and labels -> summed loss

Weights are in the fused layout of `fused_weights.fuse`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.model import Layer
from jaxpar.config import Config, Model, replace
from jaxpar.config.layout.layer_split import layers_before_stages, slots_per_chunk
from jaxpar.config.remat_policies import names_on_host, of_layers, saved_names
from jaxpar.execution.decisions import Execution
from jaxpar.execution.remat import all_on_device, rematerialize
from jaxpar.model import embedding, lora, mtp, norm
from jaxpar.model.attention_context import (
    AttentionContext,
    Contexts,
    context_of_layer,
    counted_once,
)
from jaxpar.model.chunks import layers_of_chunk
from jaxpar.model.fused_weights import (
    IN_USE,
    TOP_DIMS,
    dense_prefix,
    layer_dims,
    only,
    outside_dims,
    outside_layer,
)
from jaxpar.model.layer import layer
from jaxpar.model.loss import LossWeights, cross_entropy, num_chunks, softcapped
from jaxpar.model.parameters import Tree
from jaxpar.model.weights import gather, layer_stream
from jaxpar.parallel import optional
from jaxpar.parallel.collectives import broadcast_from_last_stage, sum_over_stages, varying
from jaxpar.parallel.fsdp.prefetch import through_layers
from jaxpar.parallel.tensor.shards import gather_sequence, scatter_sequence
from jaxpar.sharding.axes import FSDP_AXES, PIPELINE
from jaxpar.sharding.batch import Batch

#: Names of saved values -> a layer function that saves them.
type Rematerialized = Callable[[tuple[str, ...]], Callable[..., Any]]


# --------------------------------------------------------------------------- the three parts


@jax.named_scope("embedding")
def embed(top: Tree, batch: Batch, cfg: Config) -> jax.Array:
    """Compute the residual stream before the first layer, on every pipeline stage.

    Returns:  [B, T/(sequence*tensor), D], compute dtype.
    Communication: gather of the table (ZeRO-3); `scatter_sequence` over TENSOR; all-reduce over
              PIPELINE.
    """
    table = gather(only(top, "embed"), TOP_DIMS, cfg)["embed"]
    rows = embedding.embedding_lookup(table, batch.tokens, table.shape[0], cfg.compute.dtype)
    rows = embedding.scaled(rows, cfg.model)
    if cfg.model.max_positions:
        table = gather(only(top, "positions"), TOP_DIMS, cfg)["positions"]
        places = batch.positions
        rows += embedding.embedding_lookup(table, places, table.shape[0], cfg.compute.dtype)
    return sum_over_stages(scatter_sequence(varying(rows)))


def embed_and_first_layers(
    top: Tree,
    batch: Batch,
    ex: Execution,
    context_of: Callable[[Batch], Contexts],
) -> jax.Array:
    """`embed`, and the layers before the stages of a pipeline (`layers_before_stages`).

    Only the first stage reads the result. The others skip the layers, or compute them too if the
    devices of all stages must enter their collectives.

    Communication: that of `embed`, and of the layers.
    """
    cfg, layer = ex.cfg, _layer_outside(ex)

    def layers(x: jax.Array) -> jax.Array:
        context = context_of(batch)
        before = layers_before_stages(cfg.model, cfg.parallel)
        for k, of in enumerate(cfg.model.layers[:before]):
            w = outside_layer(top, dense_prefix(k))
            w = lora.with_frozen_base(gather(w, outside_dims(w, of, cfg.model), cfg))
            x = layer(x, w, context_of_layer(context, of))
        return x

    x = embed(top, batch, cfg)
    if ex.stage_wide_collectives:
        return layers(x)
    return lax.cond(lax.axis_index(PIPELINE) == 0, layers, lambda x: x, x)


def stage(
    chunk: Any,
    x: jax.Array,
    context: Contexts,
    passthrough: Tree,
    ex: Execution,
    layers_of: Rematerialized,
    *,
    first: int = 0,
) -> tuple[jax.Array, Tree]:
    """Apply one chunk of layers (a tuple of trees, or one stacked tree) to the residual stream.

    Args:     passthrough: weights that are used after the layers. The backward of unrolled layers
              overlaps the communication of their gradients. layers_of: the result of
              `rematerialized`, for unrolled layers. first: index of the first layer in its chunk,
              if `chunk` is a segment of one.
    Returns:  (x, passthrough).
    """
    p = ex.cfg.parallel
    if not isinstance(chunk, tuple):
        return _loop(ex, chunk, x, lax.stop_gradient(context)), passthrough
    in_use = iter([w.get(IN_USE) for w in chunk])
    chunk = tuple(map(_weights, chunk))
    of_each = _blocks(ex.cfg, range(first, first + len(chunk)), layers_of)
    blocks = iter(of_each)
    rows = _in_groups(x, p.row_groups)
    for of, equal, of_these in runs_of_layers(chunk, context, ex.cfg, first):
        stream = layer_stream(of, ex)
        these = tuple(itertools.islice(blocks, len(equal)))
        contexts = _in_groups(of_these, p.row_groups)
        used = tuple(itertools.islice(in_use, len(equal)))
        rows, passthrough = through_layers(these, stream, equal, rows, passthrough, contexts, used)
    return (rows[0] if len(rows) == 1 else jnp.concatenate(rows)), passthrough


def _in_groups(tree: Any, groups: int) -> tuple[Any, ...]:
    """Split arrays of [B, ...] into row groups."""
    cut = lambda i: jax.tree.map(lambda a: jnp.split(a, groups)[i], tree)  # noqa: E731
    return tuple(cut(i) for i in range(groups)) if groups > 1 else (tree,)


def _weights(w: Tree) -> Tree:
    return {name: a for name, a in w.items() if name != IN_USE}


def runs_of_layers(
    chunk: tuple, context: Contexts, cfg: Config, first: int = 0
) -> list[tuple[Layer, tuple, AttentionContext]]:
    """Split a chunk into runs of equal layers.

    Every chunk begins with the same layers (`config/validate.py` checks this).

    Args:     first: index of the first layer in its chunk, if `chunk` is a segment of one.
    Returns:  runs of consecutive layers: the layer, their parameters, and its context.
    """
    layers = layers_of_chunk(cfg)[first : first + len(chunk)]
    runs: list[tuple[Layer, tuple, AttentionContext]] = []
    for of, group in itertools.groupby(zip(layers, chunk, strict=True), lambda pair: pair[0]):
        runs.append((of, tuple(w for _, w in group), context_of_layer(context, of)))
    return runs


@jax.named_scope("loss")
def head(
    top: Tree, x: jax.Array, batch: Batch, cfg: Config, weights: LossWeights
) -> tuple[jax.Array, jax.Array]:
    """Compute the summed loss of a microbatch from the last stage's residual stream.

    Args:     x: [B, T/(sequence*tensor), D], read on the last pipeline stage. weights: of losses
              beside the cross entropy.
    Returns:  (loss with z-loss, loss), as `cross_entropy`.
    Communication: broadcast over PIPELINE; gather over TENSOR; that of `cross_entropy`.
    """
    x = broadcast_from_last_stage(before_logits(top, x, cfg.model))
    return token_loss(top, x, batch.labels, cfg, weights.z_loss)


@jax.named_scope("loss")
def head_with_modules(
    top: Tree,
    x: jax.Array,
    batch: Batch,
    ex: Execution,
    context_of: Callable[[Batch], Contexts],
    mtp_loss: jax.Array | float,
    loss_of: Callable[[Tree, jax.Array, Batch], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, list[jax.Array]]:
    """`head`, with the modules of multi-token prediction.

    Args:     mtp_loss: weight of their mean loss. loss_of: (weights outside the layers, normalized
              hidden states, microbatch) -> (loss to differentiate, loss to report).
    Returns:  (loss with the modules' weighted losses; the loss to report, and that of each module).
    Communication: a broadcast over PIPELINE; that of `loss_of`; for each module that of `embed`, a
              layer and `loss_of`.
    """
    from jaxpar.model.mtp import module

    cfg, m = ex.cfg, ex.cfg.model
    x = broadcast_from_last_stage(before_logits(top, x, m))
    total, loss = loss_of(top, x, batch)
    of, layer = m.module_layer, _layer_outside(ex)
    losses, context = [loss], context_of_layer(counted_once(context_of(batch)), of)
    for k in range(m.mtp_depth):
        batch = module.shifted(batch, cfg)
        w = outside_layer(top, mtp.prefix(k))
        w = gather(w, outside_dims(w, of, m), cfg)
        x = module.module(x, embed(top, batch, cfg), w, context, cfg, layer)
        more, loss = loss_of(top, x, batch)
        total += mtp_loss / m.mtp_depth * more
        losses.append(loss)
    return total, losses


def _layer_outside(ex: Execution) -> Callable[..., jax.Array]:
    """Return a layer outside the stages: (x, complete weights, context) -> x. It is in the compute
    dtype."""
    cfg = replace(
        ex.cfg,
        **{
            "compute.matmul_dtype": "compute",
            "compute.float8_scaling": "tensor",
            "parallel.gather_dtype": "compute",
        },
    )
    plain = dataclasses.replace(ex, cfg=cfg, norm="written", float32_weight_gradients=False)
    names = all_on_device(saved_names(ex.cfg.parallel.remat))
    block = rematerialize(functools.partial(layer, ex=plain), names, apart=False)
    return lambda x, w, context: block(x, w, context)


def token_loss(
    top: Tree, x: jax.Array, labels: jax.Array, cfg: Config, z_loss: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Compute the summed loss of tokens from their normalized hidden states.

    Args:     x: [B, T/(sequence*tensor), D]. labels: [B, T/sequence]. z_loss: its weight.
    """
    h = gather_sequence(x)
    w = gather(only(top, "head"), TOP_DIMS, cfg)["head"]
    labels, chunks = labels.ravel(), cfg.parallel.loss_chunks
    chunks = num_chunks(len(labels), w.shape[1], chunks)
    if chunks > 1 or w.dtype == jnp.float16 or lax.axis_size(FSDP_AXES) > 1:
        # The barrier is for its transpose: the layers' backward waits until the head's gradient is
        # cast and its communication has started. XLA would delay the cast to the end and keep the
        # gradient in float32 until then. With one chunk, the matmul casts the gradient.
        h, w = lax.optimization_barrier((h, w))
    logits = jnp.float32 if cfg.compute.logits_dtype == "float32" else w.dtype
    flat = h.reshape(-1, h.shape[-1]), w, labels
    return cross_entropy(*flat, z_loss, logits, chunks, cfg.model.logits_softcap)


def before_logits(top: Tree, x: jax.Array, m: Model) -> jax.Array:
    """Compute the input of the head from the last residual stream: its norm, scaled."""
    h = norm.named_norm(x, top, "final_norm", m)
    return h if m.logits_divisor == 1 else h * (1 / m.logits_divisor)


def logits_at(
    weights: Tree, batch: Batch, context: Contexts, last: jax.Array, ex: Execution
) -> jax.Array:
    """Compute logits of the token after position `last`, for sampling on a mesh without stages.

    Args:     weights: in the fused layout. batch: [B, T]; labels are not read. last: int32 scalar.
    Returns:  float32 [B, V/tensor].
    """
    top, cfg = weights["top"], ex.cfg
    (chunk,) = weights["layers"]
    x, _ = stage(chunk, embed(top, batch, cfg), context, {}, ex, rematerialized(ex))
    h = gather_sequence(before_logits(top, x, cfg.model))
    row = lax.dynamic_index_in_dim(h, last, axis=1, keepdims=False)
    w = gather(only(top, "head"), TOP_DIMS, cfg)["head"]
    return softcapped(jnp.dot(row, w, preferred_element_type=jnp.float32), cfg.model.logits_softcap)


def _layer(
    ex: Execution, xs: tuple, w: Tree, contexts: tuple[AttentionContext, ...]
) -> tuple[jax.Array, ...]:
    w = lora.with_frozen_base(w)
    if len(xs) == 1:
        return (layer(xs[0], w, contexts[0], ex),)
    from jaxpar.model.row_groups import layer_of_row_groups

    return layer_of_row_groups(xs, w, contexts, ex)


def rematerialized(ex: Execution) -> Rematerialized:
    """Return a function from names of saved values to a layer that saves these values.

    The layer is a function of complete weights. For the same names it is the same function
    everywhere in a step, so JAX traces it and lowers its kernels only once.
    """
    p = ex.cfg.parallel
    in_ring = p.pipeline > 1 and p.pipeline_save == "residuals"

    def of_names(names: tuple[str, ...]) -> Callable[..., Any]:
        layer = functools.partial(_layer, ex.saving(names))
        return rematerialize(layer, names, apart=in_ring)

    return functools.cache(of_names)


def _blocks(
    cfg: Config, layers: range, layer_that_saves: Rematerialized
) -> list[Callable[..., Any]]:
    """Return layers as functions of complete weights, given their indices in their chunk."""
    p = cfg.parallel
    policies = of_layers(p, slots_per_chunk(cfg))[layers.start : layers.stop]
    saved = list(map(saved_names, policies))
    if p.pipeline == 1 and names_on_host(policies[-1]):
        # The last layer's backward comes right after its forward: with no work in between to hide
        # the copies, its values stay on the device.
        saved[-1] = all_on_device(saved[-1])
    return list(map(layer_that_saves, saved))


def _loop(ex: Execution, stacked: Tree, x: jax.Array, contexts: Contexts) -> jax.Array:
    """Apply stacked layers, each with its saved values, or in groups that save only their input."""
    p = ex.cfg.parallel
    block = rematerialize(_block(ex), saved_names(p.remat), apart=True)

    def period(x: jax.Array, w: Tree | list[Tree], contexts: Contexts) -> jax.Array:
        of_layers = tuple(w) if isinstance(w, list) else (w,)
        for _, equal, context in runs_of_layers(of_layers, contexts, ex.cfg):
            for of in equal:
                y, used = block(x, _weights(of), context), of.get(IN_USE)
                x = y if used is None else optional.select(used, y, x)
        return x

    def layers(x: jax.Array, w: Tree, contexts: Contexts) -> jax.Array:
        return lax.scan(lambda x, w: (period(x, w, contexts), None), x, w)[0]

    if p.remat_group == 1:
        return layers(x, stacked, contexts)
    groups = jax.tree.map(lambda a: a.reshape(-1, p.remat_group, *a.shape[1:]), stacked)
    group = rematerialize(layers, (), apart=True)
    return lax.scan(lambda x, w: (group(x, w, contexts), None), x, groups)[0]


def _block(ex: Execution):
    """Return `layer` as a function of weight shards. The backward gathers the weights again."""

    def block(x: jax.Array, w: Tree, context: AttentionContext) -> jax.Array:
        dims = layer_dims(w, context.layer, ex.cfg.model)
        w = lora.with_frozen_base(gather(w, dims, ex.cfg))
        return layer(x, w, context, ex)

    return block
