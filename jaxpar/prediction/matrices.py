"""What an optimizer does with whole matrices in a step: FLOPs, bytes sent, memory and time."""

import math
from collections import defaultdict
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.model.parameters import trainable_specs
from jaxpar.optimizer.rules import rule_of
from jaxpar.parallel.matrices import MatrixLayout, layout_of
from jaxpar.prediction import rates
from jaxpar.prediction.hardware import Gpu
from jaxpar.prediction.shard import ways
from jaxpar.sharding.params import ParamSpec, flat
from jaxpar.step.layer_order import with_slots


@dataclass(frozen=True)
class Exchanged:
    """The matrices that are exchanged together, on the device with the most of them.

    layout       of the matrices.
    count        whole matrices of the device.
    rows, columns   of each.
    elements     of all its shards, before and after the exchange, zeros included.
    exchanged    of those that are left after axes that repeat the shards have shared the work.
    """

    layout: MatrixLayout
    count: int
    rows: int
    columns: int
    elements: int
    exchanged: int

    def flops(self, steps: int) -> float:
        """Return the FLOPs of Newton-Schulz iterations of the matrices: three products each."""
        m, most = sorted((self.rows, self.columns))
        return self.count * steps * (4 * m * m * most + 2 * m**3)


def exchanged_of(cfg: Config) -> list[Exchanged]:
    """Return what is exchanged in a step. Nothing if the rule is elementwise.

    Args:     cfg: resolved.
    """
    if rule_of(cfg.optimizer.name).needs != "matrices":
        return []
    groups: dict[tuple[MatrixLayout, tuple[int, int]], int] = defaultdict(int)
    for spec in flat(with_slots(trainable_specs(cfg), cfg)).values():
        if spec.columns:
            shape = _shard_shape(spec, cfg)
            layout = layout_of(spec, shape, sharded=True)
            groups[layout, spec.matrix] += math.prod(shape[: spec.lead])
    return [_exchanged(cfg, *group, count) for group, count in groups.items()]


def _shard_shape(spec: ParamSpec, cfg: Config) -> tuple[int, ...]:
    axes = spec.partition_spec
    cut = lambda entry: (entry,) if isinstance(entry, str) else entry or ()  # noqa: E731
    return tuple(n // ways(cfg, cut(of)) for n, of in zip(spec.shape, axes, strict=True))


def _exchanged(cfg: Config, layout: MatrixLayout, matrix: tuple[int, int], count: int) -> Exchanged:
    split, repeated = ways(cfg, layout.axes), ways(cfg, layout.repeated)
    own = math.ceil(count / (split * repeated))
    block = math.prod(layout.block)
    return Exchanged(
        layout=layout,
        count=own,
        rows=matrix[0],
        columns=matrix[1],
        elements=own * split * repeated * block,
        exchanged=own * split * block,
    )


def update_bytes(cfg: Config) -> float:
    """Return the temporary bytes of the update of the matrices that need most.

    Those are what is sent and comes back, what is received, the next iterate, and two squares.
    """
    width = jnp.dtype(cfg.optimizer.muon_dtype).itemsize
    return width * max(
        (
            2 * one.elements + 2 * one.exchanged + 2 * one.count * min(one.rows, one.columns) ** 2
            for one in exchanged_of(cfg)
        ),
        default=0,
    )


def iteration_flops(cfg: Config) -> float:
    """Return the FLOPs of one device's iterations in a step. They are not model FLOPs."""
    return sum(one.flops(cfg.optimizer.muon_steps) for one in exchanged_of(cfg))


def iteration_seconds(cfg: Config, gpu: Gpu) -> float:
    """Return the time of the iterations, and of the copies before and after exchanges."""
    width, seconds = jnp.dtype(cfg.optimizer.muon_dtype).itemsize, 0.0
    rate = gpu.matmul.value / (1 if width == 2 else 4)  # float32 products are exact, not TF32
    for one in exchanged_of(cfg):
        m, most = sorted((one.rows, one.columns))
        share = rates.matmul_share(m, m, most)
        seconds += one.flops(cfg.optimizer.muon_steps) / (rate * share)
        seconds += rates.EXCHANGE_COPIES * 2 * width * one.elements / gpu.bandwidth.value
    return seconds


def sent_bytes(one: Exchanged, cfg: Config) -> tuple[float, float]:
    """Return the bytes that a device sends: in both all-to-alls, and in the all-gather."""
    width = jnp.dtype(cfg.optimizer.muon_dtype).itemsize
    split, repeated = ways(cfg, one.layout.axes), ways(cfg, one.layout.repeated)
    traded = 2 * width * one.exchanged * (split - 1) / split
    return traded, width * one.exchanged * (repeated - 1)
