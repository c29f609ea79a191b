"""The model: pure functions of local shards, with its collectives at fixed, named places."""

MAY_IMPORT = ("config", "sharding", "kernels", "execution", "parallel")
