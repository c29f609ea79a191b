"""Kernels: each has an API, a readable reference, and backends for particular hardware."""

MAY_IMPORT = ()
