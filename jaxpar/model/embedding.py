"""The embedding lookup, with the vocabulary sharded over the mesh."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import Model
from jaxpar.sharding.axes import VOCAB_AXES


def vocab_shard_index() -> jax.Array:
    """Return the index of this device's shard of the vocabulary."""
    return lax.axis_index(VOCAB_AXES)


def scaled(rows: jax.Array, m: Model) -> jax.Array:
    """Multiply embeddings by the model's factors."""
    if m.embed_scale:
        rows = rows * math.sqrt(m.d_model)
    return rows if m.embedding_multiplier == 1 else rows * m.embedding_multiplier


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embedding_lookup(
    table_VD: jax.Array, tokens_BT: jax.Array, num_rows: int, dtype: Any
) -> jax.Array:
    """Look up rows of a vocabulary shard. Tokens of other shards give zeros.

    The gradient is accumulated in float32. A frequent token adds thousands of terms, which bfloat16
    would round away.

    Args:     table_VD: this device's rows. num_rows: V, static. dtype: of the result.
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
    # A zero that depends on d_rows. Otherwise XLA would allocate the table's zeros early, together
    # with the head's at the loss.
    zero, d_rows = lax.optimization_barrier((jnp.float32(0), d_rows))
    zeros = jnp.broadcast_to(zero, (num_rows, d_rows.shape[-1]))
    d_table = zeros.at[place].add(d_rows.astype(jnp.float32), mode="drop")
    return d_table.astype(like_table.dtype), None


embedding_lookup.defvjp(_lookup_forward, _lookup_backward)
