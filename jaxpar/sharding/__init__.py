"""The mesh, the names of its axes, and the parameters and batches sharded over it."""

MAY_IMPORT = ("components", "config")
