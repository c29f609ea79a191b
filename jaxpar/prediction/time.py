"""Predicts the time of a step under a layout, by part."""

import functools
from dataclasses import dataclass

from jaxpar.config import Config, LoraConfig, Model
from jaxpar.model.flops import train_flops_per_token
from jaxpar.prediction import compute, experts, rates
from jaxpar.prediction.communication import Cluster, Traffic, traffic_of
from jaxpar.prediction.compute import Seconds
from jaxpar.prediction.frozen_model import frozen_model_of
from jaxpar.prediction.memory import on_host_per_token
from jaxpar.prediction.shard import Shard, shard_of


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a step on one GPU, and derived rates.

    matmul, attention, elementwise   kernels of the microbatches.
    optimizer    the update and the gradient norm.
    bubble       idle ticks of the pipeline.
    exposed      communication that is not overlapped, by mesh axis; "host": copies of saved values
                 to host memory and back.
    contention   slowdown of matmuls by concurrent communication.
    gaps         time between kernels.
    frozen       the forward pass of a frozen model, before the step.
    traffic      bytes sent, by axis.
    """

    matmul: float
    attention: float
    elementwise: float
    optimizer: float
    bubble: float
    exposed: dict[str, float]
    contention: float
    gaps: float
    traffic: list[Traffic]
    tokens_per_gpu: float
    model_flops: float
    model_flops_full: float
    peak: float
    frozen: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        kernels = self.matmul + self.attention + self.elementwise + self.optimizer + self.bubble
        beside = self.contention + self.gaps + self.frozen
        return kernels + sum(self.exposed.values()) + beside

    @property
    def forward(self) -> float:
        """Seconds of the forward pass, a third of a step that recomputes nothing."""
        kernels = self.matmul + self.attention + self.elementwise + self.bubble
        return (kernels + sum(self.exposed.values())) / 3

    @property
    def rate(self) -> float:
        """Tokens per second per GPU."""
        return self.tokens_per_gpu / self.total

    @property
    def mfu(self) -> float:
        """Model FLOP utilization, with causal attention (`model/flops.py`)."""
        return self.rate * self.model_flops / self.peak

    @property
    def mfu_full(self) -> float:
        """Model FLOP utilization, with full attention."""
        return self.rate * self.model_flops_full / self.peak


def step_time(cfg: Config, cluster: Cluster, imbalance: float = rates.EXPERT_IMBALANCE) -> StepTime:
    """Predict the time of a step.

    Args:     cfg: resolved. imbalance: load of the fullest rank of the expert axis, relative to the
              mean.
    """
    shard, gpu, p = shard_of(cfg, imbalance), cluster.gpu, cfg.parallel
    layer = compute.layer_seconds(cfg, shard, gpu)
    stage = compute.stage_seconds(cfg, shard, gpu)
    head = compute.head_seconds(cfg, shard, gpu)
    beside = compute.weights_seconds(cfg, shard, gpu) + compute.stash_seconds(cfg, shard, gpu)
    busy = (stage + head).times(p.num_microbatches) + beside
    traffic = traffic_of(cfg, shard, cluster)
    exposed = {t.axis: _exposed(t, busy) for t in traffic}
    if copied := on_host_per_token(cfg):
        seconds = shard.tokens * copied / gpu.host_link.value
        exposed["host"] = _beyond(seconds, layer) * shard.layers_in_turn * p.num_microbatches
    nccl = sum(max(t.nccl - exposed[t.axis], 0.0) for t in traffic)
    other = frozen_model_of(cfg)
    tokens = cfg.train.global_batch_size * cfg.data.seq_len / cluster.num_gpus
    flops = lambda causal: _model_flops(cfg.model, cfg.lora, cfg.data.seq_len, causal)  # noqa: E731
    return StepTime(
        matmul=busy.matmul,
        attention=busy.attention,
        elementwise=busy.elementwise,
        optimizer=compute.optimizer_seconds(cfg, shard, gpu),
        bubble=compute.bubble_seconds(cfg, shard, gpu),
        exposed=exposed,
        contention=rates.CONTENTION * nccl,
        gaps=_gaps(cfg, shard),
        traffic=traffic,
        tokens_per_gpu=tokens,
        model_flops=flops(True),
        model_flops_full=flops(False),
        peak=gpu.peak.value,
        frozen=step_time(other, cluster, imbalance).forward if other else 0.0,
    )


@functools.cache
def _model_flops(model: Model, lora: LoraConfig | None, seq_len: int, causal: bool) -> float:
    return train_flops_per_token(model, seq_len, causal=causal, lora=lora)


def _exposed(traffic: Traffic, busy: Seconds) -> float:
    """Return the exposed share, or what exceeds the compute time that can hide it."""
    return max(traffic.exposed * traffic.seconds, traffic.seconds - rates.HIDING * busy.total)


def _beyond(copy: float, layer: Seconds) -> float:
    """Return the exposed seconds of a layer's copies to host memory and back.

    They overlap the next layer's forward, a third of its time, and its backward.
    """
    return max(copy - layer.total / 3, 0.0) + max(copy - layer.total * 2 / 3, 0.0)


def _gaps(cfg: Config, shard: Shard) -> float:
    p = cfg.parallel
    units = p.num_microbatches + (p.pipeline - 1) / p.virtual_stages
    kernels = rates.KERNELS_PER_LAYER * shard.layers_in_turn * units * p.row_groups
    return rates.STEP_START + rates.GAP * kernels + experts.round_seconds(cfg, shard)
