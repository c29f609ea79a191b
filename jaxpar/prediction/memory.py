"""Predicts the memory of one GPU: the state exactly, the step's temporaries by a model.

The temporaries peak at one of a few moments. At the loss, all saved values wait for the backward,
plus the head's gradient and a chunk of logits. When the backward begins, the saved values are still
live, plus what its first layer needs. At its end, all gradients are live; and in an update of whole
matrices (Muon), they are beside what is exchanged. The buffers of each
moment were derived from XLA's memory plans of compiled steps (docs/planning.md). Sizes are bytes.

If layers gather weights and scatter gradients (ZeRO-3), barriers keep each layer's work together
(`parallel/fsdp/prefetch.py`). Without them, XLA's scheduler recomputes early, the last layer even
before the loss, and delays gradients.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.components.costs import Heads, Widths
from jaxpar.components.experts import Experts
from jaxpar.components.model import Layer
from jaxpar.config import Config
from jaxpar.config.features import reads_scores
from jaxpar.config.layout.layer_split import layers_before_stages
from jaxpar.config.remat_policies import LAYER_INPUT, REMAT_NAMES, names_on_host, saved_names
from jaxpar.config.schema.features import objective_in
from jaxpar.config.schema.items import Remat
from jaxpar.model.largest_scores import QUERIES, by_kernel
from jaxpar.model.loss import num_chunks
from jaxpar.optimizer.rules import rule_of
from jaxpar.prediction.kernels import by_kernels
from jaxpar.prediction.layer_kinds import (
    LayerKind,
    before_stages,
    hidden,
    layer_kinds,
    widths,
)
from jaxpar.prediction.shard import Shard, at_end, before_update, shard_of

# ------------------------------------------------------- The memory of one GPU at its peak, by part


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on one GPU at the peak.

    weights      float32 master weights, and those of a frozen model.
    optimizer    moments.
    activations  values saved for the backward, and one layer's recomputed values.
    logits       a chunk of logits, and the gradient of the head.
    gathered     weights in the compute dtype: gathered ones, and casts of the shards.
    gradients    gradients of parameters.
    buffers      copies of the residual stream, gathered keys and values, the batch.
    moment       when the peak occurs: "loss", "start" or "end" of the backward, "update", or in the
                 forward pass of a "frozen model".
    """

    weights: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    gradients: float
    buffers: float
    moment: str = "loss"

    @property
    def state(self) -> float:
        """Bytes that persist between steps."""
        return self.weights + self.optimizer

    @property
    def temporary(self) -> float:
        """Bytes that a step needs in addition to the state."""
        return self.activations + self.logits + self.gathered + self.gradients + self.buffers

    @property
    def total(self) -> float:
        """The predicted peak."""
        return self.state + self.temporary


# ----------------------------------------------- The moments, and what is in memory at each of them


def memory_of(
    cfg: Config, *, on_reference: bool = False, softmax_by_xla: bool = False
) -> MemoryForecast:
    """Predict the memory of one GPU.

    Args:     cfg: resolved. on_reference: attention runs on the reference backend, which stores
              all scores. softmax_by_xla: exponentials do not take the place of logits.
    """
    shard = shard_of(cfg)
    before, late = before_update(cfg, shard), at_end(cfg, shard)
    moments = [(_at_loss, before), (_at_end, late)]
    moments += [(_at_start, before)] * _sends(cfg, shard)
    if rule_of(cfg.optimizer.name).needs == "matrices":
        from jaxpar.prediction import matrices

        moments += [(_at_update, late)] * bool(matrices.exchanged_of(cfg))
    frozen, in_forward = 0.0, list[MemoryForecast]()
    if objective_in(cfg) is not None:
        from jaxpar.prediction import frozen_model

        if (other := frozen_model.frozen_model_of(cfg)) is not None:
            frozen, own = frozen_model.weights_of(other), saved_per_token(other)
            of_both = before[0] + frozen, before[1]
            in_forward = [frozen_model.forward_pass(other, *of_both, own, _buffers(cfg, shard))]
    at = [
        moment(cfg, shard, weights + frozen, optimizer) for moment, (weights, optimizer) in moments
    ]
    if softmax_by_xla:
        logits = at[0].logits + _logits_beside_exponentials(cfg, shard)
        at[0] = dataclasses.replace(at[0], logits=logits)
    peak = max(at + in_forward, key=lambda memory: memory.total)
    if not on_reference:
        return peak
    extra = _scores(cfg, shard)
    return MemoryForecast(**{**vars(peak), "buffers": peak.buffers + extra})


def _at_loss(cfg: Config, shard: Shard, weights: float, optimizer: float) -> MemoryForecast:
    begun = 0.0 if _sends(cfg, shard) else _recomputed(cfg, shard) + _put_off(cfg, shard)
    return MemoryForecast(
        weights=weights,
        optimizer=optimizer,
        activations=saved_bytes(cfg, shard) + begun,
        logits=_loss_bytes(cfg, shard),
        gathered=_gathered(cfg, shard) + shard.width * shard.table,
        gradients=_accumulated(cfg, shard),
        buffers=_buffers(cfg, shard),
        moment="loss",
    )


def _at_start(cfg: Config, shard: Shard, weights: float, optimizer: float) -> MemoryForecast:
    """The last layer's backward, with the next layer's weights and the head's cast gradient."""
    ahead = 2 * _sent_width(cfg, shard) * shard.gathered(shard.layer)
    ahead *= cfg.parallel.zero == 3
    return MemoryForecast(
        weights=weights,
        optimizer=optimizer,
        activations=saved_bytes(cfg, shard) + _recomputed(cfg, shard),
        logits=0.0,
        gathered=_gathered(cfg, shard) + ahead,
        gradients=_accumulated(cfg, shard) + 2 * shard.width * shard.table * shard.trainable,
        buffers=_buffers(cfg, shard) + _in_a_layer(cfg, shard),
        moment="start",
    )


def _at_end(cfg: Config, shard: Shard, weights: float, optimizer: float) -> MemoryForecast:
    """All gradients.

    If layers scatter theirs: float32 shards, plus those of two layers and the head in 16 bits.
    Otherwise complete gradients, plus the float32 arrays that stack them.
    """
    layers, tables = shard.stack.everything, 2 * shard.table
    own = 4 * shard.owned
    if not shard.trainable:
        local = own = 0.0
    elif _sends(cfg, shard):
        own = 4 * shard.owned_of(shard.stack)
        local = _accumulated(cfg, shard) + shard.width * (2 * shard.layer.matrices + shard.table)
    elif _accumulates(cfg):
        local = _accumulated(cfg, shard)
    else:
        local = shard.width * (layers + tables) if shard.fsdp > 1 else 0
        if local and shard.expert_fsdp == 1:  # those of experts are not scattered
            local -= shard.width * shard.stack.experts
    return MemoryForecast(
        weights=weights,
        optimizer=optimizer,
        activations=shard.tokens * saved_per_token(cfg) + _recomputed(cfg, shard),
        logits=0.0,
        gathered=0.0,
        gradients=local + own,
        buffers=_buffers(cfg, shard) + _in_a_layer(cfg, shard),
        moment="end",
    )


def _at_update(cfg: Config, shard: Shard, weights: float, optimizer: float) -> MemoryForecast:
    """The update of whole matrices: gradients, and what is exchanged."""
    from jaxpar.prediction import matrices

    return MemoryForecast(
        weights=weights,
        optimizer=optimizer,
        activations=0.0,
        logits=0.0,
        gathered=0.0,
        gradients=4 * shard.owned * shard.trainable,
        buffers=matrices.update_bytes(cfg),
        moment="update",
    )


# ------------------------------------------------------------------------------ activations


def saved_bytes(cfg: Config, shard: Shard) -> float:
    """Return the values saved for the backward at the loss: one microbatch, or the stash."""
    p, slot = cfg.parallel, slot_bytes(cfg, shard)
    if p.pipeline == 1:
        return slot
    slots, outputs = 2 * shard.chunks * p.pipeline - 1, 0.0
    if p.schedule == "gpipe":  # all microbatches, and the last stage's outputs
        slots = p.num_microbatches
        outputs = slots * shard.tokens * shard.width * cfg.model.d_model / p.tensor
    if shard.execution.stage_wide_collectives:
        slots += 1  # for values that no backward reads
        if p.pipeline_save == "residuals":
            slots += 1  # the slot that is being written
    recomputed = _unit_bytes(cfg, shard) if p.pipeline_save == "inputs" else 0.0
    beside = postponed_bytes(cfg, shard) + _before_stages(cfg, shard)
    return slots * slot + outputs + recomputed + beside


def _before_stages(cfg: Config, shard: Shard) -> float:
    """Return what the backward of the dense layers before the stages saves of one microbatch."""
    layers = layers_before_stages(cfg.model, cfg.parallel)
    if not layers:
        return 0.0
    device, host = _saved_by(cfg, before_stages(cfg), cfg.parallel.remat)
    return layers * shard.tokens * (device + host)


def slot_bytes(cfg: Config, shard: Shard) -> float:
    """Return what one forward action saves: one microbatch in one chunk."""
    if cfg.parallel.pipeline > 1 and cfg.parallel.pipeline_save == "inputs":
        return shard.tokens * shard.width * cfg.model.d_model / cfg.parallel.tensor
    return _unit_bytes(cfg, shard)


def _unit_bytes(cfg: Config, shard: Shard) -> float:
    return shard.layers / shard.chunks * shard.tokens * saved_per_token(cfg)


def saved_per_token(cfg: Config) -> float:
    """Return the bytes saved on the device per token and layer, including the layer's input.

    They are those of docs/parallelism.md, without values in host memory.
    """
    p = cfg.parallel
    if p.remat_group > 1:  # the input of each group
        return _stream(cfg) / p.tensor / p.remat_group
    return _average(cfg, 0) + 8  # the scales of two norms, float32


def on_host_per_token(cfg: Config) -> float:
    """Return the bytes saved in host memory per token and layer."""
    return _average(cfg, 1)


def _average(cfg: Config, where: int) -> float:
    """The bytes per token and layer on the device (0) or in host memory (1), over all layers."""
    return sum(kind.share * _saved_by(cfg, kind)[where] for kind in layer_kinds(cfg))


def _saved_by(cfg: Config, kind: LayerKind, remat: Remat = ()) -> tuple[float, float]:
    """The bytes per token and layer on the device and in host memory.

    Args:     remat: another policy than the kind's.
    """
    policy, of = remat or kind.remat, kind.experts
    on_host = set(names_on_host(policy))
    here = {name for name in saved_names(policy) if name in REMAT_NAMES} | {LAYER_INPUT} - on_host
    sizes = bytes_of_names(cfg, kind.layer)
    if {"qkv", "qk"} <= here | on_host:
        # Queries and keys before RoPE are then not needed.
        value = widths(kind.layer, cfg, cfg.parallel.tensor).value
        sizes["qkv"] = _stream(cfg) / cfg.model.d_model * value
    if of:  # hidden values of the router's experts are never saved
        from jaxpar.prediction import experts

        sizes["gate_up"] *= experts.saved_rows(cfg, of)
        sizes["mlp_hidden"] *= of.num_shared_experts
    device, host = (sum(sizes[name] for name in sorted(names)) for names in (here, on_host))
    if of:
        device += experts.plan_bytes(cfg, of) + experts.saved_bytes(cfg, of, policy)
    return device, host


def host_bytes(cfg: Config) -> float:
    """Return the bytes in host memory of one device and microbatch."""
    shard = shard_of(cfg)
    return shard.tokens * shard.layers * on_host_per_token(cfg)


def _stream(cfg: Config) -> int:
    """Return the bytes of a token's residual stream."""
    return jnp.dtype(cfg.compute.dtype).itemsize * cfg.model.d_model


def bytes_of_names(cfg: Config, layer: Layer) -> dict[str, float]:
    """Return the bytes per token of each savable value of a layer, and of its input.

    In a layer with experts, gate_up and mlp_hidden are those of a row of one expert.
    """
    c, tensor, of = cfg.compute, cfg.parallel.tensor, layer.feed_forward
    width, stream, w = jnp.dtype(c.dtype).itemsize, _stream(cfg), widths(layer, cfg, tensor)
    has_experts = isinstance(of, Experts)
    of_row = of.expert.hidden(cfg.model, tensor) if isinstance(of, Experts) else None
    into, f = of_row or hidden(layer, cfg, tensor)
    heads = layer.mixer.attention_heads if layer.mixer else None
    sizes = {
        LAYER_INPUT: stream / tensor,
        "attn_norm": stream,
        "latents": width * w.latents / tensor,
        "latent_norms": width * w.latents,
        "qkv": width * (w.query + w.kept),
        "qk": width * (w.query + w.key),
        "attn_out": width * w.out,
        "attn_lse": 4 * heads.queries / tensor if heads else 0.0,
        "attn_residual": stream / tensor,
        "mlp_norm": stream,
        "gate_up": width * into,
        "mlp_hidden": width * f,
    }
    if c.matmul_dtype == "float8" and c.float8_scaling == "tensor":
        # Experts' kernels read the norm's output, and round its rows again in the backward.
        for name in ("attn_norm", "mlp_hidden", *["mlp_norm"] * (not has_experts)):
            sizes[name] /= width
        sizes["attn_out"] *= (width + 1) / width
    return sizes


def _recomputed(cfg: Config, shard: Shard) -> float:
    """One layer's values that are recomputed; its backward needs them all at once.

    In a pipeline, those of all layers of one VJP segment, because XLA starts them together, unless
    they wait for gathers over tensor.
    """
    p, kinds = cfg.parallel, layer_kinds(cfg)
    missing = max(
        _saved_by(cfg, kind, "none")[0]
        - _saved_by(cfg, kind)[0]
        + _backward_bytes(cfg, kind, shard)
        for kind in kinds
    )
    at_once = shard.execution.layers_per_vjp or shard.layers / shard.chunks
    layers = at_once if p.pipeline > 1 and p.tensor == 1 else 1
    saved = min(_saved_by(cfg, kind)[0] for kind in kinds)
    group = p.remat_group * shard.tokens * saved if p.remat_group > 1 else 0.0
    return layers * shard.tokens * max(missing, 0.0) + group


def _backward_bytes(cfg: Config, kind: LayerKind, shard: Shard) -> float:
    """Bytes per token that the backward of a recurrence or of experts needs at once."""
    total, mixer = 0.0, kind.layer.mixer
    if kind.experts:
        from jaxpar.prediction import experts

        total += experts.backward_bytes(cfg, kind.experts, shard.width)
    if mixer:
        total += mixer.backward_bytes(cfg.parallel.tensor, by_kernels=by_kernels(cfg.compute))
    return total


def _put_off(cfg: Config, shard: Shard) -> float:
    """Gradients of a chunk's projections that wait for matmuls at its end.

    Stages with row groups have no VJP segments. With recomputation, XLA does not delay them.
    """
    p, of_layer = cfg.parallel, 0.0
    if p.pipeline == 1 or p.row_groups == 1 or _recomputed(cfg, shard):
        return 0.0
    for kind in layer_kinds(cfg):
        sizes = bytes_of_names(cfg, kind.layer)
        of_layer += kind.share * (sizes["gate_up"] + sizes["qkv"])
    return shard.layers / shard.chunks * shard.tokens * of_layer


# ------------------------------------------------------------- weights, gradients and the loss


def _accumulates(cfg: Config) -> bool:
    return cfg.parallel.num_microbatches > 1 or cfg.parallel.pipeline > 1


def _accumulated(cfg: Config, shard: Shard) -> float:
    """Float32 sums over microbatches: of shards (ZeRO-2, 3) or of complete gradients (ZeRO-1)."""
    if not _accumulates(cfg) or not shard.trainable:
        return 0.0
    return 4 * (shard.parameters if cfg.parallel.zero == 1 else shard.owned)


def _sends(cfg: Config, shard: Shard) -> bool:
    """Return whether each layer scatters its gradients (ZeRO-2 and ZeRO-3)."""
    return cfg.parallel.zero != 1 and shard.fsdp > 1


def _sent_width(cfg: Config, shard: Shard) -> int:
    return 1 if cfg.parallel.gather_dtype == "float8" else shard.width


def _gathered(cfg: Config, shard: Shard) -> float:
    """Weights in the compute dtype, except the head.

    ZeRO-3: the shards of all layers, cast once for forward and backward; or, in a loop over
    microbatches, their float32 slices and the transposed shard of the head. ZeRO-1 and 2: complete
    ones.
    """
    if cfg.parallel.zero != 3:
        again = 1 if cfg.parallel.pipeline > 1 else 0  # each tick looks up tokens again
        return shard.width * (shard.stack.everything + again * shard.table)
    layers = shard.owned_of(shard.stack)
    if _accumulates(cfg):
        return 4 * (layers + shard.table / shard.fsdp)
    return _sent_width(cfg, shard) * layers


def _loss_bytes(cfg: Config, shard: Shard) -> float:
    """The head's gradient, in float32 for several chunks, and a chunk's logits and their gradient.

    The latter has the compute dtype, and replaces logits in place. Each MTP module has the former.
    Objectives that compute logits again in the backward have them in float32 beside their gradient,
    and keep the head's input.
    """
    n = num_chunks(shard.tokens, shard.vocab, cfg.parallel.loss_chunks)
    if recomputed := _recomputed_logits(cfg):
        kept = shard.width * shard.tokens * cfg.model.d_model
        chunk = (recomputed + shard.width) * shard.tokens / n * shard.vocab
        return 4 * shard.table * shard.trainable + chunk + kept
    logits = 4 if cfg.compute.logits_dtype == "float32" else 0
    of_head = 4 if n > 1 or cfg.compute.dtype == "float16" else shard.width
    chunk = (logits + shard.width) * shard.tokens / n * shard.vocab
    return (1 + cfg.model.mtp_depth) * of_head * shard.table * shard.trainable + chunk


def _recomputed_logits(cfg: Config) -> int:
    of = objective_in(cfg)
    return 0 if of is None else of.recomputed


def _logits_beside_exponentials(cfg: Config, shard: Shard) -> float:
    """A chunk of logits in the compute dtype, which the softmax's kernel would overwrite."""
    if cfg.compute.logits_dtype == "float32" or _recomputed_logits(cfg):
        return 0.0  # `_loss_bytes` has them
    n = num_chunks(shard.tokens, shard.vocab, cfg.parallel.loss_chunks)
    return shard.width * shard.tokens / n * shard.vocab


def _in_a_layer(cfg: Config, shard: Shard) -> float:
    """Gradients that a layer's backward creates: those of its three widest values.

    Those of experts are a part of `experts.backward_bytes`.
    """
    kinds = [*layer_kinds(cfg)]
    if layers_before_stages(cfg.model, cfg.parallel):
        kinds.append(before_stages(cfg))
    widest = max(hidden(kind.layer, cfg, cfg.parallel.tensor)[1] for kind in kinds)
    return 3 * shard.tokens * shard.width * widest


def _buffers(cfg: Config, shard: Shard) -> float:
    m, p = cfg.model, cfg.parallel
    stream = shard.tokens * shard.width * m.d_model / p.tensor
    of, of_token = objective_in(cfg), 16
    for dims, dtype in ({} if of is None else of.batch_extra(cfg)).values():
        of_token += math.prod(dims) * jnp.dtype(dtype).itemsize
    batch = of_token * cfg.train.global_batch_size * cfg.data.seq_len
    batch //= p.replica * p.data * p.expert * p.sequence
    keys = 0.0
    if p.sequence > 1 and p.context == "allgather":
        widest = max((w.key + w.value for w, _ in _attention(cfg)), default=0.0)
        keys = shard.rows * cfg.data.seq_len * widest * shard.width
    return 2 * stream + batch + keys + _largest_scores(cfg, shard)


def _attention(cfg: Config) -> list[tuple[Widths, Heads]]:
    """The widths and heads of each kind of layer with attention."""
    found = []
    for kind in layer_kinds(cfg):
        if kind.layer.mixer and (heads := kind.layer.mixer.attention_heads):
            found.append((widths(kind.layer, cfg, cfg.parallel.tensor), heads))
    return found


def _largest_scores(cfg: Config, shard: Shard) -> float:
    """The largest float32 score of each query, without a kernel all scores of some queries, and the
    keys of the complete sequence."""
    p, length = cfg.parallel, cfg.data.seq_len
    if not reads_scores(cfg):
        return 0.0

    def of_layer(w: Widths, heads: Heads) -> float:
        kernel = by_kernel(cfg.compute.dtype, heads.key_dim)
        of_key = 1 / p.sequence if kernel else min(QUERIES, length)
        scores = 4.0 * shard.rows * heads.queries / p.tensor * of_key * length
        return scores + shard.rows * length * w.key * shard.width * (p.sequence > 1)

    return max((of_layer(*one) for one in _attention(cfg)), default=0.0)


def _scores(cfg: Config, shard: Shard) -> float:
    """The reference's float32 scores, their softmax, and both gradients."""
    p, length = cfg.parallel, cfg.data.seq_len
    keys = length if p.context != "ring" else length // p.sequence
    most = max((heads.queries for _, heads in _attention(cfg)), default=0)
    return 16.0 * shard.rows * most / p.tensor * (length / p.sequence) * keys


# ------ Predicts the buffer of a zero-bubble schedule: factors of weight gradients that are put off


def postponed_bytes(cfg: Config, shard: Shard) -> float:
    """Return the factors of postponed weight gradients: 2 (P - 1) microbatches in one chunk."""
    if not shard.execution.postpones_weight_gradients:
        return 0.0
    layers = 2 * (cfg.parallel.pipeline - 1) * shard.layers / shard.chunks
    return layers * shard.tokens * factors_per_token(cfg, shard)


def factors_per_token(cfg: Config, shard: Shard) -> float:
    """Return the bytes per token of the factors of a layer's weight gradients. If layers differ,
    their mean.

    They are the inputs of its matmuls, and the gradients of the outputs. The gradients of layers
    with experts are those of the mixer: others are not postponed.
    """
    kinds = layer_kinds(cfg)
    return shard.width * sum(kind.share * _elements(kind, cfg, shard) for kind in kinds)


def _elements(kind: LayerKind, cfg: Config, shard: Shard) -> float:
    model, layer, elements = cfg.model, kind.layer, 0.0
    for component in (layer.mixer, None if kind.experts else layer.feed_forward):
        for of in component.matmuls(model, cfg.parallel.tensor).values() if component else ():
            elements += sum(site.times * site.share * (site.inner + site.out) for site in of)
    if layer.feed_forward and layer.feed_forward.fuses_gate_up and shard.execution.fused_gate_up:
        elements -= model.d_model  # one input of gate and up
    return elements
