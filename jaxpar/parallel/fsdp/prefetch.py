"""Layers whose weights are gathered one layer ahead, in the forward and in the backward.

Autodiff gathers a layer's weights again as part of its recomputation, which cannot start before
the gradient of the layer's output arrives. That is too late to hide the gather. The custom backward
here starts a gather as soon as the layer *above* starts its backward. At most two layers have
complete weights at a time.

Source:   Zhao et al. 2023 (2304.11277), section 3.3.2: backward prefetching.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jaxpar.parallel import optional
from jaxpar.parallel.host_offload import fetch_from_host, in_host_memory, store_to_host


@dataclass(frozen=True)
class WeightStream:
    """The functions that gather a layer's weights and scatter their gradients."""

    cast: Callable[[Any], Any]
    """Convert a layer's shards to the dtype in which they are gathered."""
    gather: Callable[[Any], Any]
    """Gather the layer's complete weights from the result of `cast`."""
    scatter: Callable[[Any], Any]
    """Reduce local gradients of complete weights to gradients of the shards."""
    gathers: bool
    """Whether `gather` communicates."""
    scatters: bool
    """Whether `scatter` communicates."""
    skips: bool = False
    """Whether a layer that is not in use is skipped. Otherwise it is computed and its result
    dropped, because other stages must enter its collectives too."""
    finish: Callable[[Any], Any] = lambda grads: grads
    """Convert a result of `scatter` to the gradients of a layer's shards. Called at the end of the
    backward, without communication."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def through_layers(
    blocks: tuple[Callable[..., Any], ...],
    stream: WeightStream,
    shards: tuple[Any, ...],
    x: Any,
    passthrough: Any,
    context: Any,
    in_use: tuple[Any, ...] = (),
) -> Any:
    """Apply each layer's block to `x`: `block(x, gather(cast(shard)), context)`.

    Args:     blocks: one function of complete weights per layer; its remat policy decides what it
              saves. shards: one tree per layer. x: any tree of arrays. passthrough: weights that
              are used after the layers, returned unchanged, so that their gradients are complete
              when the last layer's backward ends. context: arrays without gradients. in_use: for
              each layer a bool scalar, False for a layer to leave out (its gradients are zeros), or
              None for a layer that always runs; () if all do.
    Returns:  (x, passthrough).
    Communication: for each layer, `gather` in the forward and in the backward, and `scatter` in the
              backward.
    """
    for block, shard, used in zip(blocks, shards, _of_each(in_use, blocks), strict=True):
        layer = functools.partial(block, x, stream.gather(stream.cast(shard)), context)
        x = optional.result(layer, x, used, skips=stream.skips)
    return x, passthrough


def _of_each(in_use: tuple[Any, ...], blocks: tuple) -> tuple[Any, ...]:
    return in_use or (None,) * len(blocks)


def _forward(blocks, stream, shards, x, passthrough, context, in_use):
    cast, gather = stream.cast, stream.gather
    pullbacks: list[Any] = []
    used = _of_each(in_use, blocks)
    whole = gather(cast(shards[0]))
    for i, block in enumerate(blocks):
        layer = lambda w, x, block=block: block(x, w, context)  # noqa: E731
        above = None
        if i + 1 < len(shards):
            shard = cast(shards[i + 1])
            above = _gather_from_here(gather, shard, x)[0] if stream.gathers else gather(shard)
        # Save everything that the backward needs, except the complete weights.
        run = functools.partial(jax.vjp, layer, whole, x, saveable_args=(False, True))
        x, pullback = optional.forward(run, x, used[i], skips=stream.skips)
        whole = above
        # One layer's copies to the host overlap the next layer.
        if pullbacks:
            pullbacks[-1], x = store_to_host(pullbacks[-1], x)
        pullbacks.append(pullback)
    return (x, passthrough), (shards, pullbacks, used)


def _backward(blocks, stream, saved, cotangents):
    gather = stream.gather
    (shards, pullbacks, used), (g, d_passthrough) = saved, cotangents
    # XLA reuses the casts of the forward, which take half the bytes of the float32 slices. They
    # must not be residuals: a pipeline would store them with each microbatch.
    shards = tuple(map(stream.cast, shards))
    grads: list[Any] = [d_passthrough]  # from the top down
    offloads = any(map(in_host_memory, jax.tree.leaves(pullbacks)))
    whole, g = _gather_from_here(gather, shards[-1], g)
    pullbacks[-1], g = fetch_from_host(pullbacks[-1], g)
    for i in reversed(range(len(shards))):
        if stream.gathers:
            # Start the gather below after this layer's gather: XLA would combine the two.
            whole, g = lax.optimization_barrier((whole, g))
        pullbacks[i].args_res[0] = whole
        if i > 0:
            whole, g = _gather_from_here(gather, shards[i - 1], g)
            pullbacks[i - 1], g = fetch_from_host(pullbacks[i - 1], g)
        d_whole, g = optional.backward(pullbacks[i], g, used[i], skips=stream.skips)
        if stream.scatters or offloads:
            d_whole, grads[-1], g = _in_time(d_whole, grads[-1], g)
        grads.append(stream.scatter(d_whole))
    return tuple(map(stream.finish, reversed(grads[1:]))), g, grads[0], None, None


def _gather_from_here(gather: Callable[[Any], Any], shard: Any, g: jax.Array):
    """`gather` that can start as soon as `g` is computed, but not earlier.

    In the backward, this keeps XLA from reusing the forward's complete weights. In the forward, it
    keeps XLA from casting and gathering 8-bit weights one by one, just before their use.
    """
    shard, g = lax.optimization_barrier((shard, g))
    return gather(shard), g


def _in_time(d_whole: Any, above: Any, g: Any) -> Any:
    """Return a layer's gradients, those of the shards above, and `g`, once all are computed.

    XLA would delay the layer's gradients, and all values of the layer would stay in memory for
    them. It would also delay the sums over devices of the gradients above: these would occupy
    memory unreduced and be sent when no computation is left to hide the communication.
    """
    return lax.optimization_barrier((d_whole, above, g))


through_layers.defvjp(_forward, _backward)
