"""The process, its peers, its GPUs and its files."""

MAY_IMPORT = ("config", "execution", "jax_private")
