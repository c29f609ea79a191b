"""Measures training, and compares measurements: `python -m jaxpar.profile --bench`."""

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "parallel",
    "model",
    "step",
    "tools.profiling",
    "monitoring",
    "training",
)
