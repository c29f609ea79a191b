"""The outer rule: Nesterov momentum on the mean of the replicas' outer gradients.

Source:   Douillard et al. 2023 (2311.08105), algorithm 1.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Config, present
from jaxpar.parallel.collectives import all_gather_invariant, all_to_all, psum
from jaxpar.sharding.axes import REPLICA


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
