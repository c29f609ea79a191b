"""Predicts what one GPU sends in a step, by mesh axis, and how long that takes.

The bytes are those of docs/parallelism.md. A group of devices inside a host uses NVLink. A group
that spans hosts is as fast as the slower of NVLink and the network. Each host uses one network card
per GPU of the group.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.config import Config, replace
from jaxpar.model.parameters import trainable_specs
from jaxpar.parallel.expert.tokens import group_axes
from jaxpar.parallel.replicas.reduction import sent_bytes
from jaxpar.prediction import experts, matrices, rates
from jaxpar.prediction.compute import repeats, tensor_messages
from jaxpar.prediction.hardware import Gpu, Network
from jaxpar.prediction.layer_kinds import LayerKind, layer_kinds, widths
from jaxpar.prediction.shard import Shard, ways
from jaxpar.sharding.axes import (
    AXES,
    EXPERT_FSDP_AXES,
    FSDP_AXES,
    PIPELINE,
    REPLICA,
    SEQUENCE,
    TENSOR,
)
from jaxpar.step.layer_order import with_slots


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, `per_host` per host, and the network between hosts."""

    gpu: Gpu
    network: Network
    num_gpus: int
    per_host: int


@dataclass(frozen=True)
class Traffic:
    """The communication over one axis in a step, or of the optimizer's "matrices".

    sent       bytes that one GPU sends.
    seconds    duration without overlap; `nccl` is the part in NCCL's kernels.
    exposed    share that is not overlapped with computation, on NVLink.
    """

    axis: str
    sent: float
    seconds: float
    nccl: float
    exposed: float


def traffic_of(cfg: Config, shard: Shard, cluster: Cluster) -> list[Traffic]:
    """Return the traffic of each axis that communicates."""
    of_axes = (_fsdp, _replica, _expert, _sequence, _tensor, _pipeline, _matrices)
    found = (of_axis(cfg, shard, cluster) for of_axis in of_axes)
    return [traffic for traffic in found if traffic is not None]


def span(cfg: Config, axes: tuple[str, ...], per_host: int) -> tuple[int, int]:
    """Return the ranks of a group over adjacent mesh axes, and how many of them share a host."""
    inner = AXES[AXES.index(axes[-1]) + 1 :]
    stride, ranks = ways(cfg, inner), ways(cfg, axes)
    here = max(per_host // stride, 1) if stride < per_host else 1
    return ranks, min(ranks, here)


def span_with_gaps(cfg: Config, axes: tuple[str, ...], per_host: int) -> tuple[int, int]:
    """Return the same as `span`, for axes that have others between them."""
    spans = [span(cfg, (axis,), per_host) for axis in axes]
    ranks, here = (math.prod(sizes) for sizes in zip(*spans, strict=True))
    return ranks, here


def ring_bandwidth(ranks: int, here: int, cluster: Cluster, share: float = 0.0) -> float:
    """Return the bytes/s that a rank sends in an all-gather, reduce-scatter or all-reduce.

    Args:     share: of NVLink's bandwidth; 0: `rates.nccl_share`.
    """
    link = cluster.gpu.nvlink.value * (share or rates.nccl_share(ranks))
    if here == ranks:
        return link
    through = here * cluster.network.bandwidth.value
    return min(link, through) if here > 1 else cluster.network.bandwidth.value


def direct_bandwidth(ranks: int, here: int, cluster: Cluster) -> float:
    """Return the bytes/s that a rank sends in all-to-alls and permutes.

    Copy engines move the data inside a host. To other hosts, each GPU sends its own share.
    """
    if here == ranks:
        return cluster.gpu.nvlink.value * rates.COPIES
    outside = (ranks - here) / max(ranks - 1, 1)
    return cluster.network.bandwidth.value / outside


def _fsdp(cfg: Config, shard: Shard, cluster: Cluster) -> Traffic | None:
    """Gathers of weights and scatters of gradients.

    On an expert axis, the matrices of experts travel over data and sequence only.
    """
    apart = shard.stack.experts if cfg.parallel.expert > 1 else 0
    others = shard.stack.matrices - apart
    found = [_of_matrices(cfg, shard, cluster, FSDP_AXES, others, 2 * shard.table)]
    if apart:
        found.append(_of_matrices(cfg, shard, cluster, EXPERT_FSDP_AXES, apart, 0))
    sent, seconds, nccl, exposed = (sum(values) for values in zip(*found, strict=True))
    return Traffic("data", sent, seconds, nccl, exposed / seconds) if sent else None


def _of_matrices(
    cfg: Config, shard: Shard, cluster: Cluster, axes: tuple[str, ...], layers: int, tables: int
) -> tuple[float, float, float, float]:
    """Return bytes, seconds, and the parts in NCCL's kernels and exposed, of FSDP's matrices.

    Args:     axes: that shard them. layers, tables: parameters of the device's layers, of embedding
              and head.
    """
    p = cfg.parallel
    spans = span_with_gaps if axes == EXPERT_FSDP_AXES else span
    ranks, here = spans(cfg, axes, cluster.per_host)
    if ranks == 1:
        return 0.0, 0.0, 0.0, 0.0
    part = (ranks - 1) / ranks
    times = p.num_microbatches if p.pipeline == 1 else p.num_microbatches + p.pipeline - 1
    if p.zero == 3:
        width = 1 if p.gather_dtype == "float8" else shard.width
        gathered = times * (2 * width * layers + shard.width * tables)
    else:
        gathered = shard.width * (layers + tables)
    if p.zero == 1:
        summed = p.num_microbatches > 1 or p.pipeline > 1
        scattered = (4 if summed else shard.width) * (layers + tables)
    else:
        scattered = times * shard.width * (layers + tables)
    scattered *= shard.trainable
    once = p.zero < 3 and p.pipeline == 1
    share = rates.GATHERED_ONCE if once else 0.0
    gathers = nccl = part * gathered / ring_bandwidth(ranks, here, cluster, share)
    if p.grad_reduce == "bfloat16":
        nccl += part * scattered / ring_bandwidth(ranks, here, cluster)
        copies = 0.0
    else:
        copies = part * scattered / direct_bandwidth(ranks, here, cluster)
    seconds, exposed = nccl + copies, rates.EXPOSED["data"]
    exposed = exposed * seconds + once * (rates.EXPOSED["gathered once"] - exposed) * gathers
    return part * (gathered + scattered), seconds, nccl, exposed


def _replica(cfg: Config, shard: Shard, cluster: Cluster) -> Traffic | None:
    """The sum of gradients over replicas, in float32 or compressed, or DiLoCo's outer steps."""
    ranks, here = span(cfg, (REPLICA,), cluster.per_host)
    if ranks == 1 or not shard.trainable:
        return None
    sent, exposed = sent_over_replicas(cfg), rates.EXPOSED["replica"]
    if d := cfg.diloco:  # an outer step, spread over the steps between
        sent *= jnp.dtype(d.outer_dtype).itemsize / 4 / d.every
        exposed = exposed if d.overlap else 1.0
    seconds = sent / ring_bandwidth(ranks, here, cluster)
    passes = compression_seconds(cfg, cluster.gpu)
    if passes:
        exposed = (exposed * seconds + passes) / (seconds + passes)
    return Traffic("replica", sent, seconds + passes, seconds, exposed)


def sent_over_replicas(cfg: Config) -> float:
    """Return the bytes that a device sends over REPLICA in a step, from the parameters' shapes."""
    return sent_bytes(with_slots(trainable_specs(cfg), cfg), cfg.parallel)


def compression_seconds(cfg: Config, gpu: Gpu) -> float:
    """Return the time to compress gradients on one GPU, without what errors take."""
    exact, r = replace(cfg, **{"parallel.replica_reduction": "float32"}), cfg.parallel.replica
    size = sent_over_replicas(exact) * r / (2 * (r - 1))
    return rates.COMPRESSION[cfg.parallel.replica_reduction] * size / gpu.bandwidth.value


def in_words_of_sums(cfg: Config) -> str:
    """Describe the sum of gradients over replicas, and the bytes that it sends, for the log."""
    method, sent = cfg.parallel.replica_reduction, sent_over_replicas(cfg)
    text = f"{cfg.parallel.replica}, which sum gradients in {method}: "
    text += f"{sent / 1e6:,.3g} MB per step and device over {REPLICA}"
    if method == "float32":
        return text
    whole = sent_over_replicas(replace(cfg, **{"parallel.replica_reduction": "float32"}))
    return f"{text}, {whole / sent:.3g} times fewer than in float32"


def _expert(cfg: Config, shard: Shard, cluster: Cluster) -> Traffic | None:
    """Tokens or rows to the devices of their experts, and sums home."""
    ranks, here = span_with_gaps(cfg, group_axes(cfg.parallel), cluster.per_host)
    p, sent, seconds, exposed = cfg.parallel, 0.0, 0.0, 0.0
    # Dense layers before the stages have none.
    before = shard.dense_in_turn / shard.layers_in_turn if p.pipeline > 1 else 0.0
    for kind in layer_kinds(cfg):
        of_layer = experts.sent_bytes(cfg, kind.experts, shard) if kind.experts else 0.0
        if not kind.experts or not of_layer:
            continue
        layer = of_layer / direct_bandwidth(ranks, here, cluster)
        if shard.execution.expert_dispatch == "rows" and here == ranks:
            layer *= rates.COPIES / rates.ROWS
        units = _layer_units(cfg, shard) * (1 - before) * kind.share
        sent, seconds = sent + units * of_layer, seconds + units * layer
        hidden = experts.exposed_share(cfg, kind.experts, shard, cluster.gpu, layer)
        exposed += units * layer * hidden
    return Traffic("expert", sent, seconds, 0.0, exposed / seconds) if sent else None


def _sequence(cfg: Config, shard: Shard, cluster: Cluster) -> Traffic | None:
    ranks, here = span(cfg, (SEQUENCE,), cluster.per_host)
    if ranks == 1:
        return None
    of_layer = sum(k.share * _of_attention(cfg, k, shard, ranks) for k in layer_kinds(cfg))
    sent = _layer_units(cfg, shard) * of_layer
    seconds = sent / direct_bandwidth(ranks, here, cluster)
    return Traffic("sequence", sent, seconds, 0.0, rates.EXPOSED["sequence"])


def _of_attention(cfg: Config, kind: LayerKind, shard: Shard, ranks: int) -> float:
    """Bytes that a rank sends over SEQUENCE in a layer. Other mixers than attention send little."""
    p, mixer = cfg.parallel, kind.layer.mixer
    if mixer is None or mixer.attention_heads is None:
        return 0.0
    w, tokens = widths(kind.layer, cfg, p.tensor), shard.width * shard.rows * cfg.data.seq_len
    kv, q, part = tokens * (w.key + w.value), tokens * (w.query + w.out) / 2, (ranks - 1) / ranks
    if p.context == "allgather":
        return 3 * part * kv
    if p.context == "ring":
        again = "attention" in repeats(cfg, kind.layer, kind.remat)
        return ((2 + again) * part + 2) * kv
    wider = ranks // math.gcd(mixer.attention_heads.keys // p.tensor, ranks)
    return 3 * part * (2 * q + wider * kv) / ranks


def _layer_units(cfg: Config, shard: Shard) -> int:
    """Layers times microbatches of the slowest stage, plus idle ticks that communicate."""
    p = cfg.parallel
    idle = (p.pipeline - 1) // p.virtual_stages if shard.execution.stage_wide_collectives else 0
    return shard.layers_in_turn * (p.num_microbatches + idle)


def _tensor(cfg: Config, shard: Shard, cluster: Cluster) -> Traffic | None:
    p = cfg.parallel
    ranks, here = span(cfg, (TENSOR,), cluster.per_host)
    if ranks == 1:
        return None
    messages = sum(
        kind.share * tensor_messages(cfg, kind.layer, repeats(cfg, kind.layer, kind.remat))
        for kind in layer_kinds(cfg)
    )
    moved = messages * _layer_units(cfg, shard) + 4 * p.num_microbatches
    stream = shard.width * shard.tokens * cfg.model.d_model
    sent = moved * stream * (ranks - 1) / ranks
    seconds = sent / direct_bandwidth(ranks, here, cluster)
    how = "tensor in row groups" if p.row_groups > 1 else "tensor"
    if shard.execution.collective_matmul:
        how = "tensor in shards"
    return Traffic("tensor", sent, seconds, 0.0, rates.EXPOSED[how])


def _pipeline(cfg: Config, shard: Shard, cluster: Cluster) -> Traffic | None:
    """Permutes between stages each tick; all-reduces of embeddings and of the last output."""
    p = cfg.parallel
    ranks, here = span(cfg, (PIPELINE,), cluster.per_host)
    if ranks == 1:
        return None
    stream = shard.width * shard.tokens * cfg.model.d_model / p.tensor
    ticks = p.num_microbatches * p.virtual_stages + p.pipeline - 1
    permuted = 2 * ticks * stream
    reduced = 4 * p.num_microbatches * stream * 2 * (ranks - 1) / ranks
    copies = permuted / direct_bandwidth(ranks, here, cluster)
    nccl = reduced / ring_bandwidth(ranks, here, cluster)
    sent = permuted + reduced
    return Traffic("pipeline", sent, copies + nccl, nccl, rates.EXPOSED["pipeline"])


def _matrices(cfg: Config, shard: Shard, cluster: Cluster) -> Traffic | None:
    """Exchanges of matrices for the optimizer, and gathers along axes that repeat their shards."""
    sent = seconds = nccl = 0.0
    for one in matrices.exchanged_of(cfg):
        traded, gathered = matrices.sent_bytes(one, cfg)
        if traded:
            seconds += traded / direct_bandwidth(*_span_of(cfg, one.layout.axes, cluster), cluster)
        if gathered:
            nccl += gathered / ring_bandwidth(*_span_of(cfg, one.layout.repeated, cluster), cluster)
        sent += traded + gathered
    if not sent:
        return None
    return Traffic("matrices", sent, seconds + nccl, nccl, rates.EXPOSED["matrices"])


def _span_of(cfg: Config, axes: tuple[str, ...], cluster: Cluster) -> tuple[int, int]:
    return span_with_gaps(cfg, axes, cluster.per_host)
