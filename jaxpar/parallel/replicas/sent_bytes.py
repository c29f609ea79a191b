"""The bytes that a device sends over `replica` in a step, from the shapes of the parameters.

With R replicas and n float32 elements of a device's shard, an all-reduce sends 2 (R - 1) / R times
its bytes, an all-to-all (R - 1) / R times, and an all-gather R - 1 times what each one has.
"""

import math
from typing import Any

from jaxpar.config.schema import ParallelConfig
from jaxpar.parallel.replicas.feedback import compresses
from jaxpar.parallel.replicas.pieces import BLOCK
from jaxpar.parallel.replicas.top_k import BYTES, groups_of
from jaxpar.sharding.axes import axes_of
from jaxpar.sharding.params import ParamSpec, flat


def sent_bytes(specs: Any, p: ParallelConfig) -> float:
    """Return the bytes that each device sends over REPLICA for the sums of all gradients.

    Args:     specs: ParamSpecs of the trainable parameters, with a row for each slot of a layer.
              p: resolved.
    """
    return sum(_of(spec, p) for spec in flat(specs).values())


def _of(spec: ParamSpec, p: ParallelConfig) -> float:
    ways = lambda axes: math.prod(getattr(p, axis) for axis in axes)  # noqa: E731
    n, r = math.prod(spec.shape) // ways(sorted(axes_of(spec.partition_spec))), p.replica
    summed = 2 * (r - 1) / r
    if not compresses(spec, p):
        return summed * 4 * n
    if p.replica_reduction == "bfloat16":
        return summed * 2 * r * -(-n // r)
    if p.replica_reduction == "int8":
        blocks = r * -(-n // (r * BLOCK))
        return summed * blocks * (BLOCK + 4)
    groups = groups_of(n, p.replica_top_k)
    return (r - 1) * groups.number * groups.sent * BYTES
