"""The reduction of gradients, with a compressed sum over `replica` where a run asks for one.

It is hierarchical: gradients are first summed in float32 over the other axes, on whose devices each
parameter is sharded, and each device then sends its own shard over the slow link.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config.schema import ParallelConfig
from jaxpar.parallel.collectives import all_gather_invariant, all_to_all, psum
from jaxpar.parallel.gradients import missing_axes
from jaxpar.parallel.replicas.top_k import BYTES, groups_of, sum_top_k
from jaxpar.sharding.axes import REPLICA, axes_of
from jaxpar.sharding.params import ParamSpec, flat


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


# -------------------------------- What compressed sums over replicas keep from step to step: errors
#
# Every array is described by a `ParamSpec`, from which shape, sharding and initial values follow.
#
# errors    of each compressed parameter, float32, with a dim of replicas. Only the sum over
#           replicas has a meaning of its own: the part of all gradients so far that no update
#           has had.


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


# --------------------------------------------------------------- Sums over replicas in few bytes
#
# Each replica adds up its piece of an array, and sends the sum.
#
# An all-reduce adds numbers on their way, so it cannot send codes that only mean something with a
# scale. Here, codes travel by all-to-all, are decoded and added in float32, and the sum of each
# piece travels as codes again, by all-gather. Both together send as many elements as an all-reduce.


#: Neighboring elements that share a scale.
BLOCK = 256

#: Largest code. -128 is not used, so that codes are symmetric.
LARGEST = 127

#: Arrays that are sent in place of float32 [..., n].
type Codes = tuple[jax.Array, ...]


def sum_pieces(
    x: jax.Array, block: int, encode: Callable[[jax.Array], Codes], decode: Callable
) -> tuple[jax.Array, jax.Array]:
    """Sum over replicas, and return what the codes left out.

    Args:     x: float32, any shape. block: pieces are multiples of it; the last one is padded with
              zeros. encode: float32 [..., block] -> codes with the same first dims. decode: undoes
              `encode`, up to its rounding.
    Returns:  (the sum, the same on every replica; this replica's error, of the shape of x). An
              error is what the codes of this replica lack, plus what the codes of the sum lack in
              the piece that it adds up: errors and sum add up to the sum of all x.
    Communication: over REPLICA, an all-to-all and an all-gather of the codes.
    """
    n = lax.axis_size(REPLICA)
    blocks = -(-x.size // (n * block))
    padded = jnp.pad(x.reshape(-1), (0, n * blocks * block - x.size))
    pieces = padded.reshape(n, blocks, block)
    codes = encode(pieces)
    received = decode(*(all_to_all(c, REPLICA, 0, 0) for c in codes))
    own = jnp.sum(received, axis=0)
    summed = encode(own)
    gathered = decode(*(all_gather_invariant(c[None], (REPLICA,), 0) for c in summed))
    left = (pieces - decode(*codes)).at[lax.axis_index(REPLICA)].add(own - decode(*summed))
    flat = lambda a: a.reshape(-1)[: x.size].reshape(x.shape)  # noqa: E731
    return flat(gathered), flat(left)


def to_int8(x: jax.Array) -> Codes:
    """Round float32 [..., block] to int8 codes, with one float32 scale per block.

    A block with an infinity or a NaN gets a scale that is not finite, and stays recognizable.
    """
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST
    codes = jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    return codes, scale


def from_int8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Undo `to_int8`."""
    return codes.astype(jnp.float32) * scale


#: The sum in int8. Source: Dettmers 2015 (1511.04561) for 8-bit gradients; Seide et al. 2014 for
#: error feedback, and 1-bit Adam (2102.02888), figure 3, for the two rounds.
sum_int8 = functools.partial(sum_pieces, block=BLOCK, encode=to_int8, decode=from_int8)


def to_bfloat16(x: jax.Array) -> Codes:
    """Round float32 to bfloat16, as uint16: XLA may send a bfloat16 array in float32."""
    return (lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),)


def from_bfloat16(codes: jax.Array) -> jax.Array:
    """Undo `to_bfloat16`."""
    return lax.bitcast_convert_type(codes, jnp.bfloat16).astype(jnp.float32)


def sum_bfloat16(x: jax.Array) -> jax.Array:
    """Sum over replicas in bfloat16: values and sums are rounded once each, and added in float32.

    Communication: over REPLICA, an all-to-all and an all-gather of 16 bits per element.
    """
    return sum_pieces(x, 1, to_bfloat16, from_bfloat16)[0]


# -------- The bytes that a device sends over `replica` in a step, from the shapes of the parameters
#
# With R replicas and n float32 elements of a device's shard, an all-reduce sends 2 (R - 1) / R
# times its bytes, an all-to-all (R - 1) / R times, and an all-gather R - 1 times what each one has.


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
