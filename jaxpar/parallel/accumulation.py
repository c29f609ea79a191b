"""Microbatches through a model that is not cut into stages: gradients added up.

And what this shares with the pipeline: the model as a schedule sees it, and float32 sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import varying
from jaxpar.parallel.float32_gradients import added
from jaxpar.params import join

type Sums = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Program:
    """The model as a schedule sees it. `mb` is one microbatch; weights: `top`, a dict, and `chunk`.

    embed   (top, mb) -> x. Every stage calls it together.
    stage   (chunk, x, mb, beside) -> x, beside. The latter: weights that `head` is given, whose
            gradients travel beside the layers' backward.
    head    (top, x, mb) -> (loss, loss to report). Every stage calls it together; reads x on the
            last stage, and sends that stage alone a gradient.
    opened  chunk -> chunk, for gradients that matmuls add up, if they do: `float32_gradients`.
    sends   Whether `stage` sends anything that all pipeline stages come to.
    """

    embed: Callable[..., jax.Array]
    stage: Callable[..., tuple[jax.Array, Any]]
    head: Callable[..., Sums]
    opened: Callable[[Any], Any] = lambda chunk: chunk
    sends: bool = True


def take(tree: Any, i: Any) -> Any:
    """The i-th entry along the leading dim of every array."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def add32(total: Any, part: Any, add: Callable = added) -> Any:
    """Sums, and what `part` holds under their names: weights that stand still are none of them.

    Args:     add: a sum and a gradient -> the sum.
    """
    if isinstance(total, tuple):
        return tuple(add32(a, b, add) for a, b in zip(total, part, strict=True))
    if isinstance(total, dict):
        return {name: add32(total[name], part[name], add) for name in total}
    return add(total, part)


def zeros32(tree: Any) -> Any:
    """Float32 zeros of the same shapes, varying over every axis."""
    return varying(jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree))


def whole_model(program: Program, trained: Any, still: Any, mb: Any) -> Sums:
    """Loss of one microbatch on one stage: embed, all layers, head."""
    weights = join(trained, still)
    top, (chunk,) = weights["top"], weights["layers"]
    beside = {"head": top["head"]} if "head" in trained["top"] else {}
    x, beside = program.stage(chunk, program.embed(top, mb), mb, beside)
    return program.head(top | beside, x, mb)


def accumulate(program: Program, weights: Any, still: Any, microbatches: Any, scale: jax.Array):
    """Loss and gradients of a model that is not cut into stages.

    Args:     weights: {"top", "layers"}, varying over every axis; layers a tuple of one chunk.
              still: the same, of other names: weights that take no gradient; or {}. microbatches: a
              Batch of [M, ...]. scale: the loss's cotangent, 1 / number of tokens.
    Returns:  (loss sums over the local tokens, gradients like `weights`; float32 when M > 1).
    """

    def gradients(weights, mb):
        sums, vjp = jax.vjp(lambda w: whole_model(program, w, still, mb), weights)
        (grads,) = vjp(seed(sums, scale))
        return sums, grads

    if len(jax.tree.leaves(microbatches)[0]) == 1:
        return gradients(weights, take(microbatches, 0))

    def body(carry, mb):
        added_up = dict(weights, layers=tuple(map(program.opened, weights["layers"])))
        sums, grads = gradients(added_up, mb)
        return (jax.tree.map(jnp.add, carry[0], sums), add32(carry[1], grads)), None

    first = jax.eval_shape(lambda: gradients(weights, take(microbatches, 0))[0])
    start = zeros_like_type(first), zeros32(weights)
    return lax.scan(body, start, microbatches)[0]


def zeros_like_type(avals: Any) -> Any:
    """Zeros of the same shapes, dtypes and varying axes."""

    def zeros(a):
        axes = tuple(sorted(a.manual_axis_type.varying))
        z = jnp.zeros(a.shape, a.dtype)
        return lax.pcast(z, axes, to="varying") if axes else z

    return jax.tree.map(zeros, avals)


def seed(sums: Sums, scale: jax.Array) -> Sums:
    """Cotangents of (loss, reported loss)."""
    return jnp.ones_like(sums[0]) * scale, jnp.zeros_like(sums[1])
