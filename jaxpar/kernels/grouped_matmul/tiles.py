"""Which rows belong to which expert.

Rows are sorted by expert, and the first row of each expert is a multiple of the tile. A tile of
rows then belongs to one expert: kernels mask no tile, and store none partially. An expert's rows
are followed by up to a tile less one of padding. R counts the rows of a buffer, with padding.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Tiles:
    """The tiles of a buffer of rows sorted by expert. Integers, without gradients."""

    expert: jax.Array
    """int32 [R / tile]: the expert of each tile. Tiles past `used` hold some valid expert."""
    starts: jax.Array
    """int32 [E + 1]: the first row of each expert, and the end of the last expert's tiles."""
    used: jax.Array
    """int32 [1]: number of tiles that hold rows. They are the first of the buffer."""


def max_rows(rows: int, experts: int, tile: int) -> int:
    """Return the size of a buffer that holds `rows` rows however they are distributed.

    At most min(rows, experts) experts have rows, and each adds at most tile - 1 rows of padding.
    """
    most = rows + min(rows, experts) * (tile - 1)
    return most // tile * tile


def tiles_of(counts: jax.Array, rows: int, tile: int) -> Tiles:
    """Return the tiles of a buffer.

    Args:     counts: int32 [E], rows of each expert. rows: R, a multiple of `tile`, large enough
              (`max_rows`).
    """
    ends = jnp.cumsum((counts + tile - 1) // tile * tile, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    first_rows = jnp.arange(rows // tile, dtype=jnp.int32) * tile
    # Not by `searchsorted`, whose default is a loop with one kernel per iteration on GPUs.
    expert = jnp.sum(first_rows[:, None] >= ends, axis=1, dtype=jnp.int32)
    return Tiles(jnp.minimum(expert, len(counts) - 1), starts, ends[-1:] // tile)
