"""Does every mesh compute the plain model? A step, taken again."""

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "parallel",
    "model",
    "optimizer",
    "step",
    "data",
    "checkpoint",
    "monitoring",
    "training",
)
