"""Measures training, and compares measurements: `python -m jaxpar.profile --bench`."""

MAY_IMPORT = (
    "config",
    "jax_private",
    "runtime",
    "sharding",
    "parallel",
    "model",
    "step",
    "tools.profiling",
    "monitoring",
    "training",
)
