"""Further rounds: what does not fit a buffer of static size goes through it again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import varying


def add_rounds(of_round: Callable[[Any], Any], first: Any, rounds: jax.Array, most: int) -> Any:
    """Return `first`, the sums of round 0, plus those of every further round.

    On GPUs, a branch or a loop may wait for the host. The first round is therefore outside of both,
    and the second outside of the loop.

    Args:     of_round: number of a round, int32 -> its sums, a tree of arrays. rounds: int32, at
              most `most`. Devices whose rounds communicate with each other have the same number.
    """

    def add(r: Any, total: Any) -> Any:
        return varying(jax.tree.map(_add, total, of_round(r)))

    def further(total: Any) -> Any:
        total = add(jnp.int32(1), total)
        if most == 2:
            return total
        more = lambda c: (c[0] + 1, add(*c))  # noqa: E731
        begin = varying(jnp.int32(2)), total
        return lax.while_loop(lambda c: c[0] < rounds, more, begin)[1]

    if most == 1:
        return first
    return lax.cond(rounds > 1, further, lambda total: total, varying(first))


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)
