"""Layers in a row whose weights are gathered one layer ahead, in both directions.

Autodiff gathers a layer's weights again inside its recomputation, which may begin no sooner than
the gradient that comes down to it: too late for the gather to hide. Here the backward is written
out, and a gather may begin as soon as the layer *above* begins its backward. At most two layers'
weights are whole at once.

Source:   Zhao et al. 2023 (2304.11277), section 3.3.2: backward prefetching.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxpar.parallel.offload import fetched, in_host_memory, stored


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def through_layers(
    block: Callable[..., Any],
    gather: Callable[[Any], Any],
    scatter: Callable[[Any], Any],
    shards: tuple[Any, ...],
    x: Any,
    context: Any,
) -> Any:
    """`x` through `block(x, gather(shard), context)` for each shard.

    Args:     block: one layer of whole weights; what it saves is for its remat policy to say.
              gather: a layer's shards to its whole weights. scatter: local gradients of whole
              weights to the gradients of the shards. shards: one tree per layer. x: any tree of
              arrays. context: arrays that take no gradient.
    Returns:  as x.
    Communication: `gather` of each layer forward and again backward, `scatter` backward.
    """
    for shard in shards:
        x = block(x, gather(shard), context)
    return x


def _forward(block, gather, scatter, shards, x, context):
    pullbacks: list[Any] = []
    for shard in shards:
        layer = lambda w, x: block(x, w, context)  # noqa: E731
        # Everything that the backward needs is kept, but the whole weights.
        x, pullback = jax.vjp(layer, gather(shard), x, saveable_args=(False, True))
        # The copies of one layer to the host have the next layer's time.
        if pullbacks:
            pullbacks[-1], x = stored(pullbacks[-1], x)
        pullbacks.append(pullback)
    return x, (shards, pullbacks)


def _backward(block, gather, scatter, saved, g):
    shards, pullbacks = saved
    grads: list[Any] = [None] * len(shards)
    offloads = any(map(in_host_memory, jax.tree.leaves(pullbacks)))
    g, whole = _gather_from_here(gather, shards[-1], g)
    pullbacks[-1], g = fetched(pullbacks[-1], g)
    for i in reversed(range(len(shards))):
        if offloads:  # a gradient that is put off keeps its layer's values on the device
            g, grads[i + 1 : i + 2] = lax.optimization_barrier((g, grads[i + 1 : i + 2]))
        pullbacks[i].args_res[0] = whole
        if i > 0:
            g, whole = _gather_from_here(gather, shards[i - 1], g)
            pullbacks[i - 1], g = fetched(pullbacks[i - 1], g)
        d_whole, g = pullbacks[i](g)
        grads[i] = scatter(d_whole)
    return tuple(grads), g, None


def _gather_from_here(gather: Callable[[Any], Any], shard: Any, g: jax.Array):
    """`gather` that cannot begin before `g` is there: the forward's whole weights are not kept."""
    shard, g = lax.optimization_barrier((shard, g))
    return g, gather(shard)


through_layers.defvjp(_forward, _backward)
