"""What compressed sums over replicas keep from step to step: errors.

Every array is described by a `ParamSpec`, from which shape, sharding and initial values follow.

errors    of each compressed parameter, float32, with a dim of replicas. Only the sum over replicas
          has a meaning of its own: it is the part of all gradients so far that no update has had.
"""

from typing import Any

import flax.traverse_util

from jaxpar.config.schema import ParallelConfig
from jaxpar.sharding.params import ParamSpec, flat

#: Methods whose errors are kept. Rounding to bfloat16 is small enough to be forgotten.
WITH_ERRORS = ("int8", "top_k")


def compresses(spec: ParamSpec, p: ParallelConfig) -> bool:
    """Whether a parameter's gradient is compressed: if it has matrices.

    Vectors, such as norms and biases, are few; they are summed in float32.
    """
    if p.replica_reduction == "float32" or p.replica == 1:
        return False
    return spec.decay and len(spec.shape) - spec.lead >= 2


def feedback_specs(specs: Any, p: ParallelConfig) -> Any:
    """Return the specs of what is kept for the trainable parameters; () if nothing is.

    Args:     specs: ParamSpecs of the trainable parameters.
    """
    if p.replica_reduction not in WITH_ERRORS or p.replica == 1:
        return ()
    chosen = {name: spec for name, spec in flat(specs).items() if compresses(spec, p)}
    if not chosen:
        return ()
    errors = {name: error_spec(spec, p.replica) for name, spec in chosen.items()}
    return {"errors": flax.traverse_util.unflatten_dict(errors, sep="/")}


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
