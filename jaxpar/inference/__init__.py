"""Text from a model; scores of lm_eval."""

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "model",
    "step",
    "data",
    "checkpoint",
    "convert",
    "monitoring",
)
