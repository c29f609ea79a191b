"""The training state, and the train and evaluation steps, each one `shard_map`."""

MAY_IMPORT = (
    "components",
    "config",
    "runtime",
    "sharding",
    "execution",
    "parallel",
    "model",
    "objectives",
    "optimizer",
)
