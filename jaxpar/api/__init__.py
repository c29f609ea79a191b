"""The Python API, for notebooks and scripts: the names of `import jaxpar`."""

MAY_IMPORT = (
    "config",
    "runtime",
    "sharding",
    "step",
    "checkpoint",
    "convert",
    "monitoring",
    "inference",
    "training",
)
