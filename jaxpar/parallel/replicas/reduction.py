"""The reduction of gradients, with a compressed sum over `replica` where a run asks for one.

It is hierarchical: gradients are first summed in float32 over the other axes, on whose devices each
parameter is sharded, and each device then sends its own shard over the slow link.
"""

from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from jaxpar.config.schema import ParallelConfig
from jaxpar.parallel.collectives import psum
from jaxpar.parallel.gradients import missing_axes
from jaxpar.parallel.replicas.feedback import compresses, replica_dim
from jaxpar.parallel.replicas.pieces import sum_bfloat16, sum_int8
from jaxpar.parallel.replicas.top_k import sum_top_k
from jaxpar.sharding.axes import REPLICA
from jaxpar.sharding.params import flat


@jax.named_scope("reduce_gradients")
def reduce_compressed(grads: Any, feedback: Any, specs: Any, p: ParallelConfig) -> tuple[Any, Any]:
    """Sum local gradients as `reduce_gradients` does, and those of matrices compressed.

    Args:     grads: tree of float32 local shards, varying over every axis. feedback: local shards
              of `feedback_specs`; () if the method keeps nothing. specs: ParamSpecs of `grads`.
    Returns:  (the sums, of types as from `reduce_gradients`; the new feedback).
    Communication: an all-reduce per array over the axes that do not shard it, REPLICA apart; then
              that of the method over REPLICA.
    """
    errors = flat(feedback["errors"]) if feedback else {}
    sums, left = {}, {}
    of = flat(specs)
    for name, grad in flat(grads).items():
        spec, axes = of[name], missing_axes(of[name])
        if not compresses(spec, p):
            sums[name] = psum(grad, axes)
            continue
        here = psum(grad, tuple(axis for axis in axes if axis != REPLICA))
        if p.replica_reduction == "bfloat16":
            sums[name] = sum_bfloat16(here)
            continue
        here += jnp.squeeze(errors[name], replica_dim(spec))
        if p.replica_reduction == "top_k":
            sums[name], rest = sum_top_k(here, p.replica_top_k)
        else:
            sums[name], rest = sum_int8(here)
        left[name] = jnp.expand_dims(rest, replica_dim(spec))
    return _tree(sums), {"errors": _tree(left)} if feedback else ()


def _tree(arrays: dict[str, jax.Array]) -> Any:
    return flax.traverse_util.unflatten_dict(arrays, sep="/")
