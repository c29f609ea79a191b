"""Further rounds: what does not fit a buffer of static size goes through it again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import varying


def add_rounds(of_round: Callable[[Any], Any], first: Any, rounds: jax.Array, most: int) -> Any:
    """Return `first`, the sums of round 0, plus those of every further round.

    The first round is outside of the loop, so that kernels around it can be scheduled freely. XLA
    adds to `first` in place: a branch would copy it where no further round is needed.

    Args:     of_round: number of a round, int32 -> its sums, a tree of arrays. rounds: int32, at
              most `most`. Devices whose rounds communicate with each other have the same number.
    """

    def more(carry: Any) -> Any:
        r, total = carry
        return r + 1, varying(jax.tree.map(_add, total, of_round(r)))

    if most == 1:
        return first
    begin = varying(jnp.int32(1)), varying(first)
    return lax.while_loop(lambda carry: carry[0] < rounds, more, begin)[1]


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)
