"""Layers in a row whose weights are gathered one layer ahead, in both directions.

Autodiff gathers a layer's weights again inside its recomputation, which may begin no sooner than
the gradient that comes down to it: too late for the gather to hide. Here the backward is written
out, and a gather may begin as soon as the layer *above* begins its backward. At most two layers'
weights are whole at once.

Source:   Zhao et al. 2023 (2304.11277), section 3.3.2: backward prefetching.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jaxpar.parallel.host_offload import fetch_from_host, in_host_memory, store_to_host


@dataclass(frozen=True)
class WeightStream:
    """How a layer's weights come from where they are kept, and its gradients go there."""

    cast: Callable[[Any], Any]
    """A layer's shards to what is gathered of them; kept for the backward."""
    gather: Callable[[Any], Any]
    """These to the layer's whole weights."""
    scatter: Callable[[Any], Any]
    """Local gradients of whole weights to the gradients of the shards."""
    communicates: bool
    """Whether `gather` and `scatter` communicate."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def through_layers(
    blocks: tuple[Callable[..., Any], ...],
    stream: WeightStream,
    shards: tuple[Any, ...],
    x: Any,
    passthrough: Any,
    context: Any,
) -> Any:
    """`x` through each layer's block: `block(x, gather(cast(shard)), context)`.

    Args:     blocks: one function of whole weights per layer; its remat policy decides what it
              saves. shards: one tree per layer. x: any tree of arrays. passthrough: weights that
              are used after the layers, returned as they are, so that their gradients are complete
              when the last layer's backward ends. context: arrays without gradients.
    Returns:  (x, passthrough).
    Communication: `gather` of each layer forward and again backward, `scatter` backward.
    """
    for block, shard in zip(blocks, shards, strict=True):
        x = block(x, stream.gather(stream.cast(shard)), context)
    return x, passthrough


def _forward(blocks, stream, shards, x, passthrough, context):
    cast, gather = stream.cast, stream.gather
    pullbacks: list[Any] = []
    whole = gather(cast(shards[0]))
    for i, block in enumerate(blocks):
        layer = lambda w, x, block=block: block(x, w, context)  # noqa: E731
        above = None
        if i + 1 < len(shards):
            shard = cast(shards[i + 1])
            above = _gather_from_here(gather, shard, x)[0] if stream.communicates else gather(shard)
        # Everything that the backward needs is kept, but the whole weights.
        x, pullback = jax.vjp(layer, whole, x, saveable_args=(False, True))
        whole = above
        # The copies of one layer to the host have the next layer's time.
        if pullbacks:
            pullbacks[-1], x = store_to_host(pullbacks[-1], x)
        pullbacks.append(pullback)
    return (x, passthrough), (shards, pullbacks)


def _backward(blocks, stream, saved, cotangents):
    gather, communicates = stream.gather, stream.communicates
    (shards, pullbacks), (g, d_passthrough) = saved, cotangents
    # XLA takes those of the forward, which wait in half the bytes of the float32 slices. Residuals
    # they must not be: a pipeline would keep them with each microbatch.
    shards = tuple(map(stream.cast, shards))
    grads: list[Any] = [d_passthrough]  # from the top down
    offloads = any(map(in_host_memory, jax.tree.leaves(pullbacks)))
    whole, g = _gather_from_here(gather, shards[-1], g)
    pullbacks[-1], g = fetch_from_host(pullbacks[-1], g)
    for i in reversed(range(len(shards))):
        if (
            communicates
        ):  # the gather below begins when this layer's has ended: XLA would join the two
            whole, g = lax.optimization_barrier((whole, g))
        pullbacks[i].args_res[0] = whole
        if i > 0:
            whole, g = _gather_from_here(gather, shards[i - 1], g)
            pullbacks[i - 1], g = fetch_from_host(pullbacks[i - 1], g)
        d_whole, g = pullbacks[i](g)
        if communicates or offloads:
            d_whole, grads[-1], g = _in_time(d_whole, grads[-1], g)
        grads.append(stream.scatter(d_whole))
    return tuple(reversed(grads[1:])), g, grads[0], None


def _gather_from_here(gather: Callable[[Any], Any], shard: Any, g: jax.Array):
    """`gather` that cannot begin before `g` is there, and need not begin later.

    In the backward, so that the forward's whole weights are not kept. In the forward, since XLA
    would cast and gather 8-bit weights one by one, just before each is used.
    """
    shard, g = lax.optimization_barrier((shard, g))
    return gather(shard), g


def _in_time(d_whole: Any, above: Any, g: Any) -> Any:
    """A layer's gradients, those of the shards above, and `g`, once all are there.

    XLA would put the first off, for which all values of the layer wait, and the sums of the second
    over the devices, which lie there in whole pieces, and are sent when there is no work left to
    hide it.
    """
    return lax.optimization_barrier((d_whole, above, g))


through_layers.defvjp(_forward, _backward)
