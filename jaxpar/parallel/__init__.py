"""Arrays on many devices: mesh, collectives, FSDP, context parallelism, the pipeline schedule."""

MAY_IMPORT = ("config", "sharding", "kernels")
