"""Certifies meshes against a plain model, and replays steps of a run."""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
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
    "planning",
    "monitoring",
    "training",
)
