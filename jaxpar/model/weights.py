"""How a layer gathers its weights and scatters their gradients.

    cast      shards -> shards in the compute dtype or in 8 bits, as they are sent
    gather    the result -> arrays, `Float8Weight`s or `Float32GradientWeight`s, complete over
              FSDP_AXES
    scatter   gradients of these -> gradients of the shards

`WeightStream` combines the three. `parallel/fsdp/prefetch.py` runs them one layer ahead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.components.experts import experts_in
from jaxpar.components.model import Layer
from jaxpar.components.weight import Weight
from jaxpar.config import Config
from jaxpar.execution.decisions import Execution, rows_per_device
from jaxpar.kernels import float8
from jaxpar.model import lora
from jaxpar.model.chunks import layers_of_chunk
from jaxpar.model.fused_weights import COMPLETE, layer_dims, matrices_of
from jaxpar.parallel.fsdp import gather as fsdp
from jaxpar.parallel.fsdp.prefetch import WeightStream
from jaxpar.parallel.gradient_buffers import (
    attach_buffers,
    detach_buffers,
    only_gradients,
    reattach_buffers,
)

type Tree = dict[str, Any]


def layer_stream(layer: Layer, ex: Execution) -> WeightStream:
    """Return the functions that gather a layer's weights and scatter their gradients."""
    matrices = matrices_of(layer, ex.cfg.model)

    def of_layer(fn: Callable) -> Callable:
        return lambda w: fn(w, layer_dims(w, layer, ex.cfg.model), ex.cfg)

    def of_matrices(fn: Callable) -> Callable:
        return lambda w: fn(w, layer_dims(w, layer, ex.cfg.model), ex.cfg, matrices)

    return WeightStream(
        cast=of_layer(cast),
        gather=of_layer(gather),
        scatter=of_matrices(scatter),
        finish=lambda grads: finished(grads, ex.cfg, matrices),
        gathers=ex.gathers_per_layer,
        scatters=ex.scatters_per_layer,
        skips=not (ex.stage_wide_collectives or ex.activations_on_host),
    )


def with_float32_gradients(chunk: Any, first: int, ex: Execution) -> Any:
    """Attach float32 gradient buffers to a chunk if matmuls accumulate weight gradients.

    They are `Factors` if the schedule postpones weight gradients.

    Args:     first: index of the first layer in its chunk, if `chunk` is a segment of one.
    """
    if not ex.float32_weight_gradients:
        return chunk
    model, groups, rows = ex.cfg.model, ex.cfg.parallel.row_groups, None
    has_experts = bool(experts_in(model))
    if ex.postpones_weight_gradients:
        rows = rows_per_device(ex.cfg) // groups, ex.cfg.data.seq_len
    own = None if rows is None else (rows[0], rows[1] // ex.cfg.parallel.tensor)
    #: How often a matrix is used, and of how many tokens, by what it multiplies.
    uses = {
        "shards": (ex.weight_uses, rows),
        "own_tokens": (groups, own),
        "sequence": (groups, rows),
    }

    def of_layer(w: Tree, layer: Layer) -> Tree:
        # Products of experts, and of dense layers beside them, sum in float32 by themselves.
        matrices = matrices_of(layer, model).items()
        attached = [(n, of) for n, of in matrices if not (has_experts and of.converts_late)]
        for inputs, (count, tokens) in uses.items():
            names = tuple(n for n, of in attached if of.inputs == inputs)
            w = attach_buffers(w, names, count, tokens)
        return w

    layers = layers_of_chunk(ex.cfg)[first:]
    return tuple(of_layer(w, layer) for w, layer in zip(chunk, layers, strict=False))


def cast(w: Tree, dims: fsdp.Dims, cfg: Config) -> Tree:
    """Cast the shards that `gather` gathers to the dtype in which they are sent.

    In a loop over microbatches, nothing is cast. The loop receives float32 slices, and casts would
    take memory in addition to them. With ZeRO-2 only the complete weights are kept: a barrier
    around shards would keep these in memory too.
    """
    dtype, p = cfg.compute.dtype, cfg.parallel
    if p.zero == 2:
        w = {n: a for n, a in w.items() if n != COMPLETE} | w[COMPLETE]
    if p.zero != 3 or p.num_microbatches > 1:
        return detach_buffers(w)
    scales = w["scales"] if p.gather_dtype == "float8" else {}

    def cast_one(n: str, a: jax.Array) -> jax.Array:
        if n in scales:
            return fsdp.quantize_shard(a, scales[n], dtype)
        return a if dims.get(n) is None else a.astype(dtype)

    return {n: cast_one(n, a) for n, a in w.items()}


def gather(w: Tree, dims: fsdp.Dims, cfg: Config) -> Tree:
    """Return weights that are ready for matmuls, gathering them if ZeRO-3.

    With ZeRO-1 and ZeRO-2, they are gathered once before the step. With ZeRO-2, `COMPLETE` holds
    them, and the gradients are those of the shards. Weights with a scale become `Float8Weight`s,
    rounded before or after the gather.
    """
    c, p, w = cfg.compute, cfg.parallel, reattach_buffers(w)
    complete = w.pop(COMPLETE, {})
    scales, shards = w.pop("scales", {}), w
    if p.gather_dtype == "float8":
        w = {n: a for n, a in w.items() if n not in scales}
    if p.zero == 3:
        w = fsdp.gather_tree(w, dims, c.dtype, p.grad_reduce)
    for n, whole in complete.items():
        dim = dims[n]
        assert dim is not None
        w = w | {n: fsdp.gathered_earlier(w[n], whole, dim, p.grad_reduce)}
    for n, scale in scales.items():
        dim = fsdp.dim_of(dims[n])
        if p.gather_dtype == "float8":
            values, like = fsdp.gather_float8(shards[n], scale, dims[n], c.dtype, p.grad_reduce)
            w[n] = float8.Float8Weight(values, scale, like, c.float8_scaling, dim)
        else:
            w[n] = float8.quantize_weight(w[n], scale, c.float8_scaling, dim)
    return w


def scatter(grads: Tree, dims: fsdp.Dims, cfg: Config, matrices: dict[str, Weight]) -> Tree:
    """Compute the transpose of `gather`, but for `finished`.

    Gradients that `Weight.converts_late`, if they are complete on this device, keep their dtype.
    Scales, complete weights and adapters' base weights have no gradients.
    """
    rounded = {n: g.gradient for n, g in grads.items() if isinstance(g, float8.Float8Weight)}
    grads = grads | rounded
    frozen = {n: None for n in grads if cfg.lora and not lora.is_adapter(n)}
    grads = {n: g for n, g in grads.items() if n not in frozen}
    if cfg.parallel.zero != 1:
        late = {n for n, of in matrices.items() if of.converts_late}
        whole = {n: g for n, g in grads.items() if n in late and fsdp.is_whole(dims[n])}
        rest = {n: g for n, g in grads.items() if n not in whole}
        grads = fsdp.scatter_tree(rest, dims, cfg.parallel.grad_reduce) | whole
    beside = {"scales": None} if rounded else {}
    if cfg.parallel.zero == 2:
        beside[COMPLETE] = None
    return only_gradients(grads) | frozen | beside


def finished(grads: Tree, cfg: Config, matrices: dict[str, Weight]) -> Tree:
    """Convert to float32 what `scatter` left in its own dtype.

    At the end of the backward, so that the conversion is part of whatever reads the gradients, and
    not a pass over all experts.
    """
    if cfg.parallel.zero == 1:  # in the dtype of the weights that the step gathered
        return grads
    late = [n for n, of in matrices.items() if of.converts_late and grads.get(n) is not None]
    return grads | {n: grads[n].astype(jnp.float32) for n in late}
