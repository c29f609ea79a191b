"""Hints about sizes of a model with which GPUs compute matrix products slowly.

Tensor cores need rows that begin at multiples of 16 bytes; otherwise slower kernels run. They are
fastest if rows are multiples of 128 bytes. (NVIDIA, Matrix Multiplication Background User's Guide,
"Requirements to Use Tensor Cores".)
"""

import jax.numpy as jnp

from jaxpar.config import Config, value_of

#: Bytes of which a row must be a multiple, and of which a hint's example is one.
NEEDED, FASTEST = 16, 128

#: The dimensions of matrix products, and the axes that shard them.
DIMENSIONS = {
    "model.d_model": (),
    "model.d_ff": ("tensor",),
    "model.vocab_size": ("tensor", "pipeline"),
}


def alignment_hints(cfg: Config) -> list[str]:
    """Return a line for each size whose shard on a device is no multiple of 16 bytes.

    Args:     cfg: resolved, or with axes set.
    """
    width = 1 if cfg.model.matmul_dtype == "float8" else jnp.dtype(cfg.model.dtype).itemsize
    needed, fastest = NEEDED // width, FASTEST // width
    hints = []
    for path, axes in DIMENSIONS.items():
        size, ways = value_of(cfg, path), 1
        for axis in axes:
            ways *= getattr(cfg.parallel, axis)
        if size // ways % needed:
            good = -(-size // (fastest * ways)) * fastest * ways
            each = f", {size // ways:,} on a device" if ways > 1 else ""
            faster = f"multiples of {needed} are faster on GPUs, such as {good:,}"
            hints.append(f"{path} = {size:,}{each}: {faster}")
    return hints
