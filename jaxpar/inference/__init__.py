"""Generates text with a model, and scores it on tasks of lm_eval."""

MAY_IMPORT = (
    "components",
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
