"""Fragments: which arrays each has, and its layers in stacks of layers.

Fragment i of n has the layers whose index is i modulo n; the first also has embeddings, the last
what comes after the layers.

Source:   Douillard et al. 2025 (2501.18512), section 2.2: strided fragments.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config, present
from jaxpar.model.parameters import specs_of
from jaxpar.parallel.collectives import all_gather_invariant, all_to_all, psum
from jaxpar.sharding.axes import REPLICA
from jaxpar.sharding.params import flat
from jaxpar.step.diloco.trainers import is_layers

#: Arrays outside the layers that belong to the first fragment. All others belong to the last.
FIRST = ("embed", "positions")


class Fragment:
    """Fragment i, on arrays by name."""

    def __init__(self, cfg: Config, i: int):
        self._i, self._n, self._specs = i, present(cfg.diloco).fragments, flat(specs_of(cfg))

    @property
    def names(self) -> list[str]:
        """The arrays of which this fragment has a part or all."""
        other = lambda name: self._i == (0 if name in FIRST else self._n - 1)  # noqa: E731
        return [name for name in self._specs if is_layers(self._specs[name]) or other(name)]

    def part(self, name: str, x: jax.Array) -> jax.Array:
        """Return this fragment's part of an array: its layers [L/n, ...], or all of it."""
        if not is_layers(self._specs[name]):
            return x
        return x.reshape(-1, self._n, *x.shape[1:])[:, self._i]

    def put(self, name: str, x: jax.Array, part: jax.Array) -> jax.Array:
        """Return the array with another part."""
        if not is_layers(self._specs[name]):
            return part
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=self._i, axis=1)
        return put(x.reshape(-1, self._n, *x.shape[1:]), part[:, None]).reshape(x.shape)


# ------------------- The outer rule: Nesterov momentum on the mean of the replicas' outer gradients
#
# Source:   Douillard et al. 2023 (2311.08105), algorithm 1.


def nesterov(
    cfg: Config, outer: jax.Array, momentum: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the new outer weights and momentum."""
    d = present(cfg.diloco)
    momentum = d.outer_momentum * momentum + gradient
    return outer - d.outer_learning_rate * (gradient + d.outer_momentum * momentum), momentum


def mean_of_replicas(x: jax.Array, dtype: str) -> jax.Array:
    """Return the mean over REPLICA, in float32, the same on every replica.

    bfloat16 rounds twice: what is sent, and the mean. Each replica sums a part of the elements.

    Args:     x: float32. dtype: in which it is exchanged.
    Communication: float32: an all-reduce. bfloat16: an all-to-all and an all-gather of as many
              elements as a ring's all-reduce sends.
    """
    n = lax.axis_size(REPLICA)
    if dtype == "float32":
        return psum(x, REPLICA) / n
    pieces = jnp.pad(_bits(x).ravel(), (0, -x.size % n)).reshape(n, -1)
    mean = jnp.mean(_of_bits(all_to_all(pieces, REPLICA, 0, 0)), axis=0)
    found = _of_bits(all_gather_invariant(_bits(mean), (REPLICA,), 0))
    return found[: x.size].reshape(x.shape)


def _bits(x: jax.Array) -> jax.Array:
    """Round to bfloat16, as uint16: XLA for CPUs would send bfloat16 as float32."""
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _of_bits(x: jax.Array) -> jax.Array:
    """Return the float32 numbers of `_bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32)
