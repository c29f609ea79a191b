"""Checks whether a machine is fit for training: `python -m jaxpar.doctor`.

docs/troubleshooting.md explains each check.

facts             what a process reads about its host
measure/          verifies collectives; times collectives, pairs of devices and matmuls
checks/           pure functions from facts and figures to findings
examination       runs the sections in order
showing           their tables
"""

MAY_IMPORT = (
    "config",
    "jax_private",
    "runtime",
    "sharding",
    "kernels",
    "execution",
    "parallel",
    "prediction",
    "monitoring",
)
