"""Kernels, each with an API, a readable reference, and backends for specific hardware."""

MAY_IMPORT = ("jax_private",)
