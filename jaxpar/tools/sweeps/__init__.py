"""Trains a config at every point of a grid of its fields, and ranks the runs: `jaxpar.sweep`."""

MAY_IMPORT = (
    "config",
    "runtime",
    "tools.report",
    "monitoring",
)
