"""Generates text with a model, and scores it on tasks of lm_eval."""

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
