"""Certifies meshes against a plain model, replays steps, and finds where two runs part."""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
    "parallel",
    "model",
    "objectives",
    "optimizer",
    "parallel",
    "execution",
    "step",
    "functional",
    "inference",
    "data",
    "checkpoint",
    "convert",
    "prediction",
    "monitoring",
    "training",
)
