"""A run from first byte to last: start, loop, evaluation, rewind, elastic."""

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "kernels",
    "execution",
    "parallel",
    "model",
    "optimizer",
    "step",
    "data",
    "checkpoint",
    "convert",
    "planning",
    "profiling",
    "monitoring",
)
