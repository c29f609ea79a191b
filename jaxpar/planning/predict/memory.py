"""Memory of one GPU under a layout: the state exactly, the step's temporaries by a model of them.

The temporaries are largest at one of three moments. At the loss, every layer's saved values wait
for the backward, beside the gradient of the head and a chunk of logits. When the backward begins,
they are all still there, beside what the first layer of it needs. At its end, all gradients are
there. Each moment's buffers were read off the plans of compiled steps (docs/planning.md); sizes are
bytes.

Where layers send weights and gradients (ZeRO-3), barriers hold each layer's work together
(`parallel/fsdp/prefetch.py`). Without them XLA's scheduler moves recomputation ahead, the last
layer's before the loss, and puts gradients off.
"""

import functools
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.config import Config, ModelConfig
from jaxpar.config.remat_policies import LAYER_INPUT, REMAT_NAMES, names_on_host, saved_names
from jaxpar.model.loss import num_chunks
from jaxpar.planning.predict.shard import Shard, moment_bytes, shard_of, state_bytes


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on one GPU at the peak.

    weights      float32 master weights.
    optimizer    moments.
    activations  values saved for the backward, and one layer's recomputed.
    logits       a chunk of logits, and the gradient of the head.
    gathered     weights in the compute dtype: whole ones, and casts of the shards.
    gradients    of parameters.
    buffers      the residual stream's copies, keys and values gathered, the batch.
    moment       when the peak is: "loss", "start" or "end" of the backward.
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
        """What is there between steps."""
        return self.weights + self.optimizer

    @property
    def temporary(self) -> float:
        """What a step needs beside the state."""
        return self.activations + self.logits + self.gathered + self.gradients + self.buffers

    @property
    def total(self) -> float:
        """The predicted peak."""
        return self.state + self.temporary


def memory_of(cfg: Config, *, on_reference: bool = False) -> MemoryForecast:
    """The prediction for one GPU.

    Args:     cfg: resolved. on_reference: attention runs on the reference backend, which holds
              its scores whole.
    """
    shard = shard_of(cfg)
    weights, optimizer = state_bytes(cfg)
    if cfg.optimizer.offload:
        optimizer -= moment_bytes(cfg) * (shard.layers - 1) // max(shard.layers, 1)
    moments = (_at_loss, _at_start, _at_end) if _sends(cfg, shard) else (_at_loss, _at_end)
    at = (moment(cfg, shard, weights, optimizer) for moment in moments)
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
    """The backward of the last layer, with the weights of the next; the head's gradient is cast,
    and on its way."""
    return MemoryForecast(
        weights=weights,
        optimizer=optimizer,
        activations=saved_bytes(cfg, shard) + _recomputed(cfg, shard),
        logits=0.0,
        gathered=_gathered(cfg, shard) + 2 * _sent_width(cfg, shard) * shard.matrices,
        gradients=_accumulated(cfg, shard) + 2 * shard.width * shard.table * shard.trainable,
        buffers=_buffers(cfg, shard) + _in_a_layer(cfg, shard),
        moment="start",
    )


def _at_end(cfg: Config, shard: Shard, weights: float, optimizer: float) -> MemoryForecast:
    """All gradients. Where layers send theirs, they are summed: float32 shards, beside two layers'
    and the head's in 16 bits. Else whole ones beside float32 arrays that stack them."""
    layers, tables = shard.layers * shard.layer, 2 * shard.table
    own = 4 * shard.parameters / shard.fsdp
    if not shard.trainable:
        local = own = 0.0
    elif _sends(cfg, shard):
        own = 4 * layers / shard.fsdp
        local = _accumulated(cfg, shard) + shard.width * (2 * shard.matrices + shard.table)
    elif _accumulates(cfg):
        local = _accumulated(cfg, shard)
    else:
        local = shard.width * (layers + tables) if shard.fsdp > 1 else 0
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


# ------------------------------------------------------------------------------ activations


def saved_bytes(cfg: Config, shard: Shard) -> float:
    """What waits for the backward when the loss is taken: of a microbatch, or the ring's slots."""
    p, slot = cfg.parallel, slot_bytes(cfg, shard)
    if p.pipeline == 1:
        return slot
    slots = 2 * shard.chunks * p.pipeline - 1
    if shard.execution.stage_wide_collectives:
        slots += 1  # for what no backward reads
        if p.pipeline_save == "residuals":
            slots += 1  # the unit that is being written
    return slots * slot + (_unit_bytes(cfg, shard) if p.pipeline_save == "inputs" else 0)


def slot_bytes(cfg: Config, shard: Shard) -> float:
    """What one unit leaves for its backward: of a microbatch in one chunk."""
    if cfg.parallel.pipeline > 1 and cfg.parallel.pipeline_save == "inputs":
        return shard.tokens * shard.width * cfg.model.d_model / cfg.parallel.tensor
    return _unit_bytes(cfg, shard)


def _unit_bytes(cfg: Config, shard: Shard) -> float:
    return shard.layers / shard.chunks * shard.tokens * saved_per_token(cfg)


def saved_per_token(cfg: Config) -> float:
    """Bytes on the device per token and layer under the remat policy, the layer's input included.

    Those of docs/parallelism.md; values that wait in host memory count there.
    """
    m, p = cfg.model, cfg.parallel
    on_device, _ = _saved_per_token(m, p.tensor, p.remat)
    return on_device + 8  # the scales of two norms, float32


def on_host_per_token(cfg: Config) -> float:
    """Bytes in host memory per token and layer under the remat policy."""
    return _saved_per_token(cfg.model, cfg.parallel.tensor, cfg.parallel.remat)[1]


def host_bytes(cfg: Config) -> float:
    """Bytes in host memory of one device's values, of a microbatch."""
    shard = shard_of(cfg)
    return shard.tokens * shard.layers * on_host_per_token(cfg)


@functools.cache
def _saved_per_token(m: ModelConfig, tensor: int, remat: str) -> tuple[float, float]:
    """On the device, and in host memory."""
    on_host = set(names_on_host(remat))
    here = {name for name in saved_names(remat) if name in REMAT_NAMES} | {LAYER_INPUT} - on_host
    sizes = bytes_of_names(m, tensor)
    if {"qkv", "qk"} <= here | on_host:
        sizes["qkv"] -= sizes["qk"]  # before RoPE they are then of no use
    if m.num_experts:  # an expert's values are computed again
        sizes["gate_up"] = sizes["mlp_hidden"] = 0.0
    return sum(sizes[name] for name in here), sum(sizes[name] for name in on_host)


def bytes_of_names(m: ModelConfig, tensor: int) -> dict[str, float]:
    """Bytes per token and layer of each value that can be saved, and of the layer's input."""
    width = jnp.dtype(m.dtype).itemsize
    heads, kv = m.num_heads * m.head_dim / tensor, m.num_kv_heads * m.head_dim / tensor
    stream, f = width * m.d_model, m.d_ff / tensor
    sizes = {
        LAYER_INPUT: stream / tensor,
        "attn_norm": stream,
        "qkv": width * (heads + 2 * kv),
        "qk": width * (heads + kv),
        "attn_out": width * heads,
        "attn_lse": 4 * m.num_heads / tensor,
        "attn_residual": stream / tensor,
        "mlp_norm": stream,
        "gate_up": 2 * width * f,
        "mlp_hidden": width * f,
    }
    if m.matmul_dtype == "float8" and m.float8_scaling == "tensor":
        for name in ("attn_norm", "mlp_norm", "mlp_hidden"):
            sizes[name] /= width
        sizes["attn_out"] *= (width + 1) / width
    return sizes


def _recomputed(cfg: Config, shard: Shard) -> float:
    """One layer's values that no policy saved, all of which its backward needs at once.

    In a pipeline's tick, those of all layers that `stage` is given at once, because XLA begins
    them together; not where they wait for gathers over tensor.
    """
    m, p = cfg.model, cfg.parallel
    missing = _saved_per_token(m, p.tensor, "none")[0] - _saved_per_token(m, p.tensor, p.remat)[0]
    if m.num_experts:  # of one expert, for all the tokens
        sizes = bytes_of_names(m, p.tensor)
        missing += sizes["gate_up"] + sizes["mlp_hidden"]
    at_once = shard.execution.layers_per_vjp or shard.layers / shard.chunks
    layers = at_once if p.pipeline > 1 and p.tensor == 1 else 1
    return layers * shard.tokens * max(missing, 0.0)


def _put_off(cfg: Config, shard: Shard) -> float:
    """Gradients of a chunk's projections that wait for matmuls at its end: in stages whose rows go
    in turns, `layers_per_vjp` cuts no chunk; where layers compute values again, XLA goes by them.
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
    """Float32 sums over microbatches: of shards under ZeRO-3, of whole gradients under ZeRO-1."""
    if not _accumulates(cfg) or not shard.trainable:
        return 0.0
    return 4 * shard.parameters / (shard.fsdp if cfg.parallel.zero == 3 else 1)


def _sends(cfg: Config, shard: Shard) -> bool:
    """Whether each layer gathers its weights and scatters their gradients."""
    return cfg.parallel.zero == 3 and shard.fsdp > 1


def _sent_width(cfg: Config, shard: Shard) -> int:
    return 1 if cfg.parallel.gather_dtype == "float8" else shard.width


def _gathered(cfg: Config, shard: Shard) -> float:
    """Weights to multiply by, the head aside.

    ZeRO-3: the shards of all layers, cast once for forward and backward; or their float32 slices,
    and the head's shard turned, which a loop over microbatches is given. ZeRO-1: whole ones.
    """
    layers = shard.layers * shard.layer
    if cfg.parallel.zero == 1:
        again = 1 if cfg.parallel.pipeline > 1 else 0  # each tick looks tokens up again
        return shard.width * (layers + again * shard.table)
    slices = 4 * (layers + shard.table)
    return (slices if _accumulates(cfg) else _sent_width(cfg, shard) * layers) / shard.fsdp


def _loss_bytes(cfg: Config, shard: Shard) -> float:
    """The head's gradient, of several chunks in float32, and a chunk's logits with their gradient
    in the compute dtype, which takes their place if it is theirs."""
    n = num_chunks(shard.tokens, shard.vocab, cfg.parallel.loss_chunks)
    logits = 4 if cfg.model.logits_dtype == "float32" else 0
    of_head = 4 if n > 1 or cfg.model.dtype == "float16" else shard.width
    chunk = (logits + shard.width) * shard.tokens / n * shard.vocab
    return of_head * shard.table * shard.trainable + chunk


def _in_a_layer(cfg: Config, shard: Shard) -> float:
    """What a layer's backward makes beside its values: gradients of its widest three."""
    return 3 * shard.tokens * shard.width * cfg.model.d_ff / cfg.parallel.tensor


def _buffers(cfg: Config, shard: Shard) -> float:
    m, p = cfg.model, cfg.parallel
    stream = shard.tokens * shard.width * m.d_model / p.tensor
    batch = 16 * cfg.train.global_batch_size * cfg.data.seq_len
    batch //= p.replica * p.data * p.expert * p.sequence
    keys = 0.0
    if p.sequence > 1 and p.context == "allgather":
        keys = 2 * shard.rows * cfg.data.seq_len * m.num_kv_heads * m.head_dim / p.tensor
        keys *= shard.width
    return 2 * stream + batch + keys


def _scores(cfg: Config, shard: Shard) -> float:
    """The reference's scores: float32, their softmax, and both gradients."""
    m, p = cfg.model, cfg.parallel
    length = cfg.data.seq_len
    keys = length if p.context != "ring" else length // p.sequence
    return 16.0 * shard.rows * m.num_heads / p.tensor * (length / p.sequence) * keys
