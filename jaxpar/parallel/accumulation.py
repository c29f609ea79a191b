"""Microbatches through a model that is not cut into stages: gradients added up.

And what this shares with the pipeline: the model as a schedule sees it, and float32 sums.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import varying
from jaxpar.parallel.gradient_buffers import add_gradient
from jaxpar.sharding.params import join

type Sums = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class StagedModel:
    """The model as a schedule sees it. `mb` is one microbatch; weights: `top`, a dict, and `chunk`.

    embed   (top, mb) -> x. Every stage calls it together.
    stage   (chunk, x, tokens, beside) -> x, beside. The latter: weights that `head` is given, whose
            gradients travel beside the layers' backward.
    head    (top, x, mb) -> (loss, loss to report). Every stage calls it together; reads x on the
            last stage, and sends that stage alone a gradient.
    tokens  mb -> what `stage` knows of it; if not given, mb itself.
    opened  chunk -> chunk, for gradients that matmuls add up, if they do: `float32_gradients`.
    sends   Whether `stage` sends anything that all pipeline stages come to.
    layers_in_part  How many layers of a chunk `stage` is given at a time, so that what one part
            leaves behind is dealt with before the next; 0: all of a chunk.
    """

    embed: Callable[..., jax.Array]
    stage: Callable[..., tuple[jax.Array, Any]]
    head: Callable[..., Sums]
    tokens: Callable[[Any], Any] = lambda mb: mb
    opened: Callable[[Any], Any] = lambda chunk: chunk
    sends: bool = True
    layers_in_part: int = 0

    def parts(self, chunk: Any) -> tuple[Any, ...]:
        """A chunk, or sums like it, in parts."""
        n = self.layers_in_part
        return tuple(itertools.batched(chunk, n)) if n else (chunk,)

    def whole(self, parts: Any) -> Any:
        """What `parts` has cut."""
        return tuple(itertools.chain(*parts)) if self.layers_in_part else parts[0]


def take(tree: Any, i: Any) -> Any:
    """The i-th entry along the leading dim of every array."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def add32(total: Any, part: Any, add: Callable = add_gradient) -> Any:
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


def whole_model(program: StagedModel, trained: Any, still: Any, mb: Any) -> Sums:
    """Loss of one microbatch on one stage: embed, all layers, head."""
    weights = join(trained, still)
    top, (chunk,) = weights["top"], weights["layers"]
    beside = {"head": top["head"]} if "head" in trained["top"] else {}
    x, beside = program.stage(chunk, program.embed(top, mb), program.tokens(mb), beside)
    return program.head(top | beside, x, mb)


def accumulate(program: StagedModel, weights: Any, still: Any, microbatches: Any, scale: jax.Array):
    """Loss and gradients of a model that is not cut into stages.

    Where layers send nothing, each adds its gradients to the sums in its own backward.

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
        if program.layers_in_part:
            sums, grads = _in_parts(program, join(weights, still), carry[1], mb, scale)
        else:
            opened = dict(weights, layers=tuple(map(program.opened, weights["layers"])))
            sums, grads = gradients(opened, mb)
            grads = add32(carry[1], grads)
        return (jax.tree.map(jnp.add, carry[0], sums), grads), None

    first = jax.eval_shape(lambda: gradients(weights, take(microbatches, 0))[0])
    start = zeros_like_type(first), zeros32(weights)
    return lax.scan(body, start, microbatches)[0]


def _in_parts(program: StagedModel, weights: Any, grads: Any, mb: Any, scale: jax.Array):
    """One microbatch: its loss sums, and `grads` with its gradients added.

    Args:     weights: all, those that stand still among them. grads: float32 sums of the others.
    Communication: that of `embed` and `head`, and over TENSOR of `stage`, forward and backward.
    """
    top, (chunk,) = weights["top"], weights["layers"]
    trained = {name: top[name] for name in grads["top"]}
    x, d_embed = jax.vjp(lambda w: program.embed(top | w, mb), trained)
    tokens = program.tokens(mb)
    x, vjps = forward_in_parts(program, chunk, x, tokens)
    sums, d_head = jax.vjp(lambda w, x: program.head(top | w, x, mb), trained, x)
    d_top, g = d_head(seed(sums, scale))
    at_top, g = lax.optimization_barrier((add32(grads["top"], d_top), g))
    in_layers, g = add_in_parts(program, chunk, grads["layers"][0], vjps, g, tokens)
    (d_top,) = d_embed(g)
    return sums, dict(top=add32(at_top, d_top), layers=(in_layers,))


def forward_in_parts(program: StagedModel, chunk: Any, x: jax.Array, tokens: Any):
    """A chunk of layers: its output, and the pullback of each part."""
    vjps = []
    for part in program.parts(chunk):
        x, vjp = pullback(program, part, x, tokens)
        vjps.append(vjp)
    return x, vjps


def pullback(program: StagedModel, part: Any, x: jax.Array, tokens: Any):
    """The output of a part, and its pullback, which holds all that the backward needs but weights
    and tokens: `pulled_back` is given these again."""
    stage = lambda part, x, tokens: program.stage(part, x, tokens, {})[0]  # noqa: E731
    return jax.vjp(stage, program.opened(part), x, tokens, saveable_args=(False, True, False))


def pulled_back(program: StagedModel, part: Any, vjp: Any, g: jax.Array, tokens: Any):
    """The gradients of a part, float32 where `opened` makes them so, and of its input: like g,
    [B, T/(sequence*tensor), D]."""
    vjp.args_res[0], vjp.args_res[2] = program.opened(part), tokens
    d_part, g, _ = vjp(g)
    return d_part, g


def add_in_parts(
    program: StagedModel, chunk: Any, sums: Any, vjps: list[Any], g: jax.Array, tokens: Any
):
    """Sums like `chunk` with its gradients added, and the gradient of its input.

    A part's gradients are added before the part below begins. XLA would put those matmuls off to
    the end of the backward, since nothing waits for them, and keep all that they read until then.

    Args:     vjps: of `forward_in_parts`. g: the gradient of the output.
    """
    parts, sums_of = program.parts(chunk), list(program.parts(sums))
    for i in reversed(range(len(parts))):
        d_part, g = pulled_back(program, parts[i], vjps[i], g, tokens)
        sums_of[i] = add32(sums_of[i], d_part)
        if i > 0:
            sums_of[i], g = lax.optimization_barrier((sums_of[i], g))
    return program.whole(sums_of), g


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
