"""What compressed sums over replicas keep from step to step: errors, and factors of PowerSGD.

Every array is described by a `ParamSpec`, from which shape, sharding and initial values follow.

errors    of each compressed parameter, float32, with a dim of replicas. Only the sum over replicas
          has a meaning of its own: it is the part of all gradients so far that no update has had.
factors   of each, [lead, columns, rank]: Q of `power_sgd.py`, the same on every replica.
"""

import math
from typing import Any

import flax.traverse_util

from jaxpar.config.schema import ParallelConfig
from jaxpar.parallel.replicas.power_sgd import dims_of
from jaxpar.sharding.params import ParamSpec, flat

#: Methods whose errors are kept. Rounding to bfloat16 is small enough to be forgotten.
WITH_ERRORS = ("int8", "top_k", "power_sgd")


def compresses(spec: ParamSpec, p: ParallelConfig) -> bool:
    """Whether a parameter's gradient is compressed: if it has matrices, and gets smaller by it.

    Vectors, such as norms and biases, are few; they are summed in float32.
    """
    if p.replica_reduction == "float32" or p.replica == 1:
        return False
    is_matrix = spec.decay and len(spec.shape) - spec.lead >= 2
    return is_matrix and (p.replica_reduction != "power_sgd" or _is_worthwhile(spec, p))


def _is_worthwhile(spec: ParamSpec, p: ParallelConfig) -> bool:
    """Whether both factors of a matrix together are smaller than it."""
    dims = dims_of(spec)
    rows, columns = math.prod(spec.shape[dims.lead : dims.cut]), math.prod(spec.shape[dims.cut :])
    return p.replica_rank * (rows + columns) < rows * columns


def feedback_specs(specs: Any, p: ParallelConfig) -> Any:
    """Return the specs of what is kept for the trainable parameters; () if nothing is.

    Args:     specs: ParamSpecs of the trainable parameters.
    """
    if p.replica_reduction not in WITH_ERRORS or p.replica == 1:
        return ()
    chosen = {name: spec for name, spec in flat(specs).items() if compresses(spec, p)}
    if not chosen:
        return ()
    parts = {"errors": {name: error_spec(spec, p.replica) for name, spec in chosen.items()}}
    if p.replica_reduction == "power_sgd":
        parts["factors"] = {n: _factor_spec(spec, p.replica_rank) for n, spec in chosen.items()}
    return {name: flax.traverse_util.unflatten_dict(of, sep="/") for name, of in parts.items()}


def replica_dim(spec: ParamSpec) -> int:
    """Return the dim of replicas in a parameter's errors: the first one behind that of layers.

    So errors of layers are put into another order as all arrays of layers are.
    """
    return 1 if spec.axes[0] == "layer" else 0


def error_spec(spec: ParamSpec, replicas: int) -> ParamSpec:
    """Return the spec of a parameter's errors."""
    at = replica_dim(spec)
    shape = (*spec.shape[:at], replicas, *spec.shape[at:])
    axes = (*spec.axes[:at], "replica", *spec.axes[at:])
    return ParamSpec(shape=shape, axes=axes, init="zeros", decay=False)


def _factor_spec(spec: ParamSpec, rank: int) -> ParamSpec:
    """Return the spec of a parameter's factors Q, random at first."""
    lead, cut, _, _ = dims_of(spec)
    shape = (*spec.shape[:lead], *spec.shape[cut:], rank)
    axes = (*spec.axes[:lead], *spec.axes[cut:], "rank")
    return ParamSpec(shape=shape, axes=axes, std=1.0, decay=False)
