"""A chunk of layers differentiated segment by segment, each adding its gradients before the next.

Nothing waits for the matmuls of weight gradients, so XLA would delay those of a whole chunk to the
end of its backward, and hold all that they read until then.
"""

from typing import Any

import jax
from jax import lax

from jaxpar.parallel.staged_model import StagedModel, add_gradients


def forward(model: StagedModel, chunk: Any, x: jax.Array, context: Any) -> tuple[Any, list[Any]]:
    """A chunk's output, and the pullback of each of its segments."""
    vjps = []
    for segment in model.segments(chunk):
        x, vjp = pullback(model, segment, x, context)
        vjps.append(vjp)
    return x, vjps


def pullback(model: StagedModel, segment: Any, x: jax.Array, context: Any) -> tuple[Any, Any]:
    """A segment's output, and its pullback without weights and context: `pull_back` supplies these
    again, so that the pullback holds nothing that lives elsewhere."""
    stage = lambda segment, x, context: model.stage(segment, x, context, {})[0]  # noqa: E731
    return jax.vjp(stage, model.attach(segment), x, context, saveable_args=(False, True, False))


def pull_back(model: StagedModel, segment: Any, vjp: Any, g: jax.Array, context: Any):
    """The gradients of a segment (float32 where `attach` makes them so), and of its input.

    Args:     g: of its output, [B, T/(sequence*tensor), D].
    """
    vjp.args_res[0], vjp.args_res[2] = model.attach(segment), context
    d_segment, g, _ = vjp(g)
    return d_segment, g


def backward(
    model: StagedModel, chunk: Any, sums: Any, vjps: list[Any], g: jax.Array, context: Any
) -> tuple[Any, jax.Array]:
    """Sums like `chunk` with its gradients added, and the gradient of its input.

    Args:     vjps: of `forward`. g: the gradient of the output.
    """
    segments, sums_of = model.segments(chunk), list(model.segments(sums))
    for i in reversed(range(len(segments))):
        d_segment, g = pull_back(model, segments[i], vjps[i], g, context)
        sums_of[i] = add_gradients(sums_of[i], d_segment)
        if i > 0:
            sums_of[i], g = lax.optimization_barrier((sums_of[i], g))
    return model.joined(sums_of), g
