"""A training run: start-up checks, training loop, evaluation, rewind, elastic resume."""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
    "kernels",
    "execution",
    "parallel",
    "model",
    "objectives",
    "optimizer",
    "step",
    "data",
    "checkpoint",
    "memory_checkpoint",
    "convert",
    "prediction",
    "monitoring",
    "stores",
)
