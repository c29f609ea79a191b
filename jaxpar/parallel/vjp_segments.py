"""Differentiate a chunk of layers segment by segment, adding each one's gradients before the next.

Nothing else in the backward reads weight gradients, so XLA would delay all their matmuls to the end
of a chunk's backward, and keep all of their inputs in memory until then.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxpar.parallel.gradient_buffers import add_gradient, has_factors
from jaxpar.parallel.staged_model import StagedModel, add_gradients


def forward(model: StagedModel, chunk: Any, x: jax.Array, context: Any) -> tuple[Any, list[Any]]:
    """Compute a chunk's output and the pullback of each of its segments."""
    vjps = []
    for i, segment in enumerate(model.segments(chunk)):
        x, vjp = pullback(model, i, segment, x, context)
        vjps.append(vjp)
    return x, vjps


def pullback(
    model: StagedModel, i: int, segment: Any, x: jax.Array, context: Any
) -> tuple[Any, Any]:
    """Compute the output of a chunk's i-th segment and its pullback.

    The pullback does not store the weights and the context, which exist anyway; `pull_back` passes
    them in again.
    """
    first = i * model.layers_per_vjp
    stage = lambda segment, x, context: model.stage(segment, x, context, {}, first=first)[0]  # noqa: E731
    attached = model.attach(segment, first)
    return jax.vjp(stage, attached, x, context, saveable_args=(False, True, False))


def pull_back(model: StagedModel, i: int, segment: Any, vjp: Any, g: jax.Array, context: Any):
    """Compute the gradients of the weights and of the input of a chunk's i-th segment.

    Weight gradients are float32 if `attach` adds float32 buffers.

    Args:     g: gradient of the segment's output, [B, T/(sequence*tensor), D].
    """
    first = i * model.layers_per_vjp
    vjp.args_res[0], vjp.args_res[2] = model.attach(segment, first), context
    d_segment, g, _ = vjp(g)
    return d_segment, g


def backward(
    model: StagedModel, chunk: Any, sums: Any, vjps: list[Any], g: jax.Array, context: Any
) -> tuple[Any, jax.Array]:
    """Add a chunk's gradients to the sums. Return the sums and the gradient of the chunk's input.

    Args:     sums: with the structure of `chunk`. vjps: as returned by `forward`. g: gradient of
              the chunk's output.
    """
    segments, sums_of = model.segments(chunk), list(model.segments(sums))
    for i in reversed(range(len(segments))):
        d_segment, g = pull_back(model, i, segments[i], vjps[i], g, context)
        sums_of[i] = add_gradients(sums_of[i], d_segment)
        if i > 0:
            sums_of[i], g = lax.optimization_barrier((sums_of[i], g))
    return model.joined(sums_of), g


def backward_without_factors(
    model: StagedModel,
    chunk: Any,
    sums: Any,
    vjps: list[Any],
    g: jax.Array,
    context: Any,
    keep: Callable[[int, Any], Any],
) -> tuple[Any, list[Any], jax.Array]:
    """Compute the gradient of a chunk's input, and leave the weight gradients that are `Factors`.

    Args:     as `backward`. keep: (index of a segment, its gradients with factors) -> where they
              are kept.
    Returns:  (sums with all other gradients, results of `keep`, gradient of the chunk's input).
    """
    segments, sums_of = model.segments(chunk), list(model.segments(sums))
    kept: list[Any] = [None] * len(segments)
    at_once = lambda total, part: total if has_factors(part) else add_gradient(total, part)  # noqa: E731
    for i in reversed(range(len(segments))):
        d_segment, g = pull_back(model, i, segments[i], vjps[i], g, context)
        sums_of[i] = add_gradients(sums_of[i], d_segment, at_once)
        kept[i] = keep(i, factors_of(d_segment))
        if i > 0:
            sums_of[i], kept[i], g = lax.optimization_barrier((sums_of[i], kept[i], g))
    return model.joined(sums_of), kept, g


def factors_of(segment: Any) -> Any:
    """Select the weights of a segment whose gradients are `Factors`."""
    return tuple({n: g.gradients for n, g in w.items() if has_factors(g)} for w in segment)


def add_factors(model: StagedModel, sums: Any, kept: list[Any]) -> Any:
    """Add the gradients that a backward without factors left, segment by segment."""
    sums_of = list(model.segments(sums))
    for i, factors in enumerate(kept):
        layers = zip(sums_of[i], factors, strict=True)
        sums_of[i] = tuple(total | _added(total, part) for total, part in layers)
    return model.joined(sums_of)


def _added(totals: dict, factors: dict) -> dict:
    added = {}
    for name, gradients in factors.items():
        added[name] = totals[name]
        for gradient in gradients:
            added[name] = add_gradient(added[name], gradient)
    return added
