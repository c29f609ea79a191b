"""The private names of JAX that the package uses, in one table, `table.py`.

They may change with any version of JAX, which pyproject.toml bounds. `tests/jax_private` says which
are no longer there, and what stands on them.
"""

MAY_IMPORT = ()
