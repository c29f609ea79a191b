"""Text from a model; scores of lm_eval."""

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "execution",
    "model",
    "step",
    "data",
    "checkpoint",
    "convert",
    "monitoring",
)
