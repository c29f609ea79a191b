"""Certifies meshes against a plain model, and replays steps of a run."""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
    "model",
    "objectives",
    "optimizer",
    "step",
    "functional",
    "inference",
    "data",
    "checkpoint",
    "planning",
    "monitoring",
    "training",
)
