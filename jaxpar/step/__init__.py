"""The one shard_map: state, train step, evaluation step."""

MAY_IMPORT = ("config", "runtime", "sharding", "execution", "parallel", "model", "optimizer")
