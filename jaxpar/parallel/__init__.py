"""Parallelism over the axes of the mesh: collectives, FSDP, tensor, context and pipeline."""

MAY_IMPORT = ("config", "sharding", "kernels")
