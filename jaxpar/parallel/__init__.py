"""Arrays on many devices: mesh, collectives, FSDP, context parallelism, the pipeline schedule."""
