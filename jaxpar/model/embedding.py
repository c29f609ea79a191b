"""The embedding, its vocabulary cut over the mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.sharding.axes import VOCAB_AXES


def vocab_shard_index() -> jax.Array:
    """Which shard of the vocabulary this device holds."""
    return lax.axis_index(VOCAB_AXES)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embedding_lookup(
    table_VD: jax.Array, tokens_BT: jax.Array, num_rows: int, dtype: Any
) -> jax.Array:
    """Rows of a vocabulary shard, cast to `dtype`; zeros for tokens that another shard holds.

    The gradient is added up in float32: a frequent token takes thousands of terms, which bfloat16
    would lose.

    Args:     table_VD: this device's rows. num_rows: V, static.
    Returns:  [B, T, D], to be summed over VOCAB_AXES.
    """
    local = tokens_BT - vocab_shard_index() * num_rows
    held = (local >= 0) & (local < num_rows)
    rows = table_VD[jnp.where(held, local, 0)].astype(dtype)
    return jnp.where(held[..., None], rows, jnp.zeros_like(rows))


def _lookup_forward(table_VD, tokens_BT, num_rows, dtype):
    rows = embedding_lookup(table_VD, tokens_BT, num_rows, dtype)
    return rows, (tokens_BT, jnp.zeros((), table_VD.dtype))


def _lookup_backward(num_rows, dtype, saved, d_rows):
    tokens_BT, like_table = saved
    local = tokens_BT - vocab_shard_index() * num_rows
    held = (local >= 0) & (local < num_rows)
    place = jnp.where(held, local, num_rows)  # past the end: dropped
    # A zero that waits for d_rows: XLA would make the table's zeros with the head's, at the loss.
    zero, d_rows = lax.optimization_barrier((jnp.float32(0), d_rows))
    zeros = jnp.broadcast_to(zero, (num_rows, d_rows.shape[-1]))
    d_table = zeros.at[place].add(d_rows.astype(jnp.float32), mode="drop")
    return d_table.astype(like_table.dtype), None


embedding_lookup.defvjp(_lookup_forward, _lookup_backward)
