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
import functools
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.config import Config, ConfigError, ModelConfig
from jaxpar.config.config_file import load_run
from jaxpar.config.layout.layer_split import dense_before_stages
from jaxpar.config.layout.teacher import FIELD, config_of_teacher
from jaxpar.config.remat_policies import (
    LAYER_INPUT,
    REMAT_NAMES,
    names_on_host,
    saved_names,
)
from jaxpar.model.loss import num_chunks
from jaxpar.model.qk_clip.logits import QUERIES
from jaxpar.planning.predict import experts, matrices
from jaxpar.planning.predict.attention import (
    LayerKind,
    before_stages,
    layer_kinds,
    projections,
    widths,
    widths_of_layers,
)
from jaxpar.planning.predict.kernels import recurrence_bytes
from jaxpar.planning.predict.shard import Shard, moment_bytes, shard_of, state_bytes

# ------------------------------------------------------- The memory of one GPU at its peak, by part


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on one GPU at the peak.

    weights      float32 master weights, and those of a teacher in memory.
    optimizer    moments.
    activations  values saved for the backward, and one layer's recomputed values.
    logits       a chunk of logits, and the gradient of the head.
    gathered     weights in the compute dtype: gathered ones, and casts of the shards.
    gradients    gradients of parameters.
    buffers      copies of the residual stream, gathered keys and values, the batch.
    moment       when the peak occurs: "loss", "start" or "end" of the backward, "update", or in the
                 forward pass of a "teacher".
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
    moments += [(_at_update, late)] * bool(matrices.exchanged_of(cfg))
    taught = teacher_of(cfg)
    frozen = weights_of(taught) if taught else 0.0
    at = [
        moment(cfg, shard, weights + frozen, optimizer) for moment, (weights, optimizer) in moments
    ]
    if softmax_by_xla:
        logits = at[0].logits + _logits_beside_exponentials(cfg, shard)
        at[0] = dataclasses.replace(at[0], logits=logits)
    if taught:
        own = saved_per_token(taught), _buffers(cfg, shard)
        at.append(forward_pass(taught, before[0] + frozen, before[1], *own))
    peak = max(at, key=lambda memory: memory.total)
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
    layers = dense_before_stages(cfg.model, cfg.parallel)
    if not layers:
        return 0.0
    device, host = _saved_by(before_stages(cfg), cfg.parallel.remat)
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
    m, p = cfg.model, cfg.parallel
    if p.remat_group > 1:  # the input of each group
        return bytes_of_names(m, p.tensor)[LAYER_INPUT] / p.remat_group
    return _average(cfg, 0) + 8  # the scales of two norms, float32


def on_host_per_token(cfg: Config) -> float:
    """Return the bytes saved in host memory per token and layer."""
    return _average(cfg, 1)


def _average(cfg: Config, where: int) -> float:
    """The bytes per token and layer on the device (0) or in host memory (1), over all layers."""
    return sum(kind.share * _saved_by(kind)[where] for kind in layer_kinds(cfg))


def _saved_by(kind: LayerKind, remat: str = "") -> tuple[float, float]:
    """The bytes per token and layer on the device and in host memory.

    Args:     remat: another policy than the kind's.
    """
    cfg = kind.cfg
    policy, rows = remat or kind.remat, experts.saved_rows(cfg)
    device, host = _saved_per_token(cfg.model, cfg.parallel.tensor, policy, rows)
    return device + experts.plan_bytes(cfg) + experts.saved_bytes(cfg, policy), host


def host_bytes(cfg: Config) -> float:
    """Return the bytes in host memory of one device and microbatch."""
    shard = shard_of(cfg)
    return shard.tokens * shard.layers * on_host_per_token(cfg)


@functools.cache
def _saved_per_token(m: ModelConfig, tensor: int, remat: str, rows: float) -> tuple[float, float]:
    """On the device, and in host memory, without the plan of experts.

    Args:     rows: `experts.saved_rows`.
    """
    on_host = set(names_on_host(remat))
    here = {name for name in saved_names(remat) if name in REMAT_NAMES} | {LAYER_INPUT} - on_host
    sizes = bytes_of_names(m, tensor)
    if {"qkv", "qk"} <= here | on_host:
        # Queries and keys before RoPE are then not needed.
        sizes["qkv"] = jnp.dtype(m.dtype).itemsize * widths(m, tensor).value
    if m.num_experts:  # hidden values of the router's experts are never saved
        sizes["gate_up"] *= rows
        sizes["mlp_hidden"] *= m.num_shared_experts
    device, host = (sum(sizes[name] for name in sorted(names)) for names in (here, on_host))
    return device, host


def bytes_of_names(m: ModelConfig, tensor: int) -> dict[str, float]:
    """Return the bytes per token and layer of each savable value and of the layer's input."""
    width = jnp.dtype(m.dtype).itemsize
    w = widths(m, tensor)
    stream, f = width * m.d_model, m.d_ff / tensor
    sizes = {
        LAYER_INPUT: stream / tensor,
        "attn_norm": stream,
        "latents": width * w.latents / tensor,
        "latent_norms": width * w.latents,
        "qkv": width * (w.query + w.kept),
        "qk": width * (w.query + w.key),
        "attn_out": width * w.out,
        "attn_lse": 4 * m.num_heads / tensor * (w.query > 0),
        "attn_residual": stream / tensor,
        "mlp_norm": stream,
        "gate_up": (2 if m.mlp_gate else 1) * width * f,
        "mlp_hidden": width * f,
    }
    if m.matmul_dtype == "float8" and m.float8_scaling == "tensor":
        # Experts' kernels read the norm's output, and round its rows again in the backward.
        for name in ("attn_norm", "mlp_hidden", *["mlp_norm"] * (not m.num_experts)):
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
        _saved_by(kind, "none")[0]
        - _saved_by(kind)[0]
        + experts.backward_bytes(kind.cfg, shard.width)
        + recurrence_bytes(kind.cfg.model, p.tensor)
        for kind in kinds
    )
    at_once = shard.execution.layers_per_vjp or shard.layers / shard.chunks
    layers = at_once if p.pipeline > 1 and p.tensor == 1 else 1
    saved = min(_saved_by(kind)[0] for kind in kinds)
    group = p.remat_group * shard.tokens * saved if p.remat_group > 1 else 0.0
    return layers * shard.tokens * max(missing, 0.0) + group


def _put_off(cfg: Config, shard: Shard) -> float:
    """Gradients of a chunk's projections that wait for matmuls at its end.

    Stages with row groups have no VJP segments. With recomputation, XLA does not delay them.
    """
    m, p = cfg.model, cfg.parallel
    if p.pipeline == 1 or p.row_groups == 1 or _recomputed(cfg, shard):
        return 0.0
    sizes = bytes_of_names(m, p.tensor)
    return shard.layers / shard.chunks * shard.tokens * (sizes["gate_up"] + sizes["qkv"])


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
    Losses that compute logits again in the backward have them in float32 beside their gradient (and
    distillation two distributions), and keep the head's input.
    """
    n = num_chunks(shard.tokens, shard.vocab, cfg.parallel.loss_chunks)
    if cfg.dpo.beta or cfg.distill.teacher:
        kept = shard.width * shard.tokens * cfg.model.d_model
        wide = 12 if cfg.distill.teacher else 8
        chunk = (wide + shard.width) * shard.tokens / n * shard.vocab
        return 4 * shard.table * shard.trainable + chunk + kept
    logits = 4 if cfg.model.logits_dtype == "float32" else 0
    of_head = 4 if n > 1 or cfg.model.dtype == "float16" else shard.width
    chunk = (logits + shard.width) * shard.tokens / n * shard.vocab
    return (1 + cfg.model.mtp_depth) * of_head * shard.table * shard.trainable + chunk


def _logits_beside_exponentials(cfg: Config, shard: Shard) -> float:
    """A chunk of logits in the compute dtype, which the softmax's kernel would overwrite."""
    if cfg.model.logits_dtype == "float32" or cfg.dpo.beta or cfg.distill.teacher:
        return 0.0  # `_loss_bytes` has them
    n = num_chunks(shard.tokens, shard.vocab, cfg.parallel.loss_chunks)
    return shard.width * shard.tokens / n * shard.vocab


def _in_a_layer(cfg: Config, shard: Shard) -> float:
    """Gradients that a layer's backward creates: those of its three widest values.

    Those of experts are a part of `experts.backward_bytes`.
    """
    kinds = layer_kinds(cfg)
    if dense_before_stages(cfg.model, cfg.parallel):
        kinds.append(before_stages(cfg))
    models = [kind.cfg.model for kind in kinds]
    widest = max(m.d_ff * (m.num_shared_experts if m.num_experts else 1) for m in models)
    return 3 * shard.tokens * shard.width * widest / cfg.parallel.tensor


def _buffers(cfg: Config, shard: Shard) -> float:
    m, p = cfg.model, cfg.parallel
    stream = shard.tokens * shard.width * m.d_model / p.tensor
    of_token = 16 + 8 * cfg.distill.top_k * bool(cfg.distill.teacher)
    batch = of_token * cfg.train.global_batch_size * cfg.data.seq_len
    batch //= p.replica * p.data * p.expert * p.sequence
    keys = 0.0
    if p.sequence > 1 and p.context == "allgather":
        widest = max(w.key + w.value for w in widths_of_layers(m, p.tensor))
        keys = shard.rows * cfg.data.seq_len * widest * shard.width
    return 2 * stream + batch + keys + _largest_logits(cfg, shard)


def _largest_logits(cfg: Config, shard: Shard) -> float:
    """The float32 scores of some queries, and the keys of the complete sequence, for QK-clip."""
    m, p, length = cfg.model, cfg.parallel, cfg.data.seq_len
    if not cfg.optimizer.qk_clip:
        return 0.0
    scores = 4.0 * shard.rows * m.num_heads / p.tensor * min(QUERIES, length) * length
    keys = shard.rows * length * widths(m, p.tensor).key * shard.width * (p.sequence > 1)
    return scores + keys


def _scores(cfg: Config, shard: Shard) -> float:
    """The reference's float32 scores, their softmax, and both gradients."""
    m, p, length = cfg.model, cfg.parallel, cfg.data.seq_len
    keys = length if p.context != "ring" else length // p.sequence
    return 16.0 * shard.rows * m.num_heads / p.tensor * (length / p.sequence) * keys


# ------ Predicts how much of a run's state is on the device, where the rest of it is in host memory


def before_update(cfg: Config, shard: Shard) -> tuple[float, float]:
    """Return the bytes of weights and of the rest of the state on the device until the update.

    Masters in host memory leave the weights of the step, in the compute dtype. They are the cast
    weights that the forecast counts as gathered. Only a loop over microbatches, whose every round
    gathers, keeps them apart.
    """
    weights, optimizer = state_bytes(cfg)
    if cfg.optimizer.offload:
        optimizer -= moment_bytes(cfg)
    if cfg.optimizer.offload_masters:
        loops = cfg.parallel.num_microbatches > 1 or cfg.parallel.pipeline > 1
        weights = weights * shard.width // 4 if loops else 0
    return weights, optimizer


def at_end(cfg: Config, shard: Shard) -> tuple[float, float]:
    """Return those at the end of the backward: of what is in host memory, also a layer's part."""
    weights, optimizer = state_bytes(cfg)
    layers = max(shard.layers, 1)
    if cfg.optimizer.offload:
        optimizer -= moment_bytes(cfg) * (layers - 1) // layers
    if cfg.optimizer.offload_masters:
        weights = weights * shard.width // 4 + weights // layers
    return weights, optimizer


# ------ Predicts the buffer of a zero-bubble schedule: factors of weight gradients that are put off


def postponed_bytes(cfg: Config, shard: Shard) -> float:
    """Return the factors of postponed weight gradients: 2 (P - 1) microbatches in one chunk."""
    if not shard.execution.postpones_weight_gradients:
        return 0.0
    layers = 2 * (cfg.parallel.pipeline - 1) * shard.layers / shard.chunks
    return layers * shard.tokens * factors_per_token(cfg, shard)


def factors_per_token(cfg: Config, shard: Shard) -> float:
    """Return the bytes per token of the factors of a layer's weight gradients.

    They are the inputs of its matmuls, and the gradients of the outputs. The gradients of experts
    are not postponed.
    """
    m, t = cfg.model, cfg.parallel.tensor
    f = m.d_ff / t
    sites = [site for of in projections(m, t).values() for site in of]
    elements = sum(site.share * (site.inner + site.out) for site in sites)
    if not m.num_experts:
        apart = m.mlp_gate and not shard.execution.fused_gate_up
        elements += (3 if apart else 2) * m.d_model + (3 if m.mlp_gate else 2) * f
    return shard.width * elements


# ------ Predicts what a teacher in memory adds to a step: its weights, and a forward pass before it


@functools.lru_cache(maxsize=4096)
def teacher_of(cfg: Config) -> Config | None:
    """Return the config with which the teacher runs beside a student.

    A forward pass recomputes nothing, so its remat policy is "none".

    Args:     cfg: of the student, resolved.
    Returns:  None without a teacher, with `distill.cache`, and if its folder is no run, which
              `check_teacher` refuses.
    Raises:   ConfigError as `config_of_teacher`.
    """
    if not cfg.distill.teacher or cfg.distill.cache:
        return None
    try:
        there = _config_of(cfg)
    except ConfigError:
        return None
    taught = config_of_teacher(cfg, there)
    return dataclasses.replace(taught, parallel=dataclasses.replace(taught.parallel, remat="none"))


def check_teacher(cfg: Config) -> None:
    """Raise ConfigError if a teacher in memory has an unknown model, and cannot be counted."""
    if not cfg.distill.teacher or cfg.distill.cache:
        return
    try:
        _config_of(cfg)
    except ConfigError as error:
        rule = f"has a model that the plan cannot count: {error.rule}"
        fix = "use the folder of a run, or --distill.cache to plan without it"
        raise ConfigError(FIELD, cfg.distill.teacher, rule, fix) from error


def _config_of(cfg: Config) -> Config:
    """Read the config of the teacher's run. Raises:   ConfigError."""
    from jaxpar.stores.reading import run_at  # a store is read only for a teacher

    folder = run_at(FIELD, cfg.distill.teacher, checkpoints=False)
    if folder is None:
        raise ConfigError(FIELD, cfg.distill.teacher, "contains no run", "use the run.dir of a run")
    return load_run(str(folder))


def weights_of(teacher: Config) -> int:
    """Return the bytes of a teacher's weights on a device."""
    return state_bytes(teacher)[0]


def forward_pass(
    teacher: Config, weights: float, optimizer: float, layer: float, buffers: float
) -> MemoryForecast:
    """Predict the memory of a device during the teacher's forward pass.

    Weights in the compute dtype are as in a step; a layer's values, and a chunk of logits and their
    exponentials in float32, are all that is live besides.

    Args:     weights, optimizer: of student and teacher. layer: bytes per token of a layer's
              values. buffers: of the student, with its batch.
    """
    shard, p, m = shard_of(teacher), teacher.parallel, teacher.model
    n = num_chunks(shard.tokens, shard.vocab, p.loss_chunks)
    gathered = float(shard.stack.everything)
    if p.zero == 3:
        gathered = shard.owned_of(shard.stack) + 2 * shard.gathered(shard.layer)
    return MemoryForecast(
        weights=weights,
        optimizer=optimizer,
        activations=shard.tokens * layer,
        logits=8.0 * shard.tokens / n * shard.vocab,
        gathered=shard.width * (gathered + shard.table),
        gradients=0.0,
        buffers=buffers + 2 * shard.tokens * shard.width * m.d_model / p.tensor,
        moment="teacher",
    )
