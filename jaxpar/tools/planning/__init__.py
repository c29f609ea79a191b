"""Ranks the layouts of a config by predicted step time, with costs and goodput: `jaxpar.plan`."""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
    "kernels",
    "model",
    "step",
    "prediction",
)
