"""Objectives and features with a section of the config: a file, or a folder, declares one.

Its class is the section: fields with their documentation, and methods that say all else. `SECTION`
names it. A file imports JAX, and packages that do, within its methods, as the config reads it. No
other package names what is here.
"""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
    "execution",
    "parallel",
    "model",
    "objectives",
    "step",
    "data",
    "checkpoint",
    "stores",
    "training",
)
