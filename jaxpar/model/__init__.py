"""The model: pure functions of local shards, with collectives at fixed, named places."""

MAY_IMPORT = ("components", "config", "sharding", "kernels", "execution", "parallel")
