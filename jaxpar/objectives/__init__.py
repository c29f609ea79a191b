"""Training objectives in place of next-token cross entropy: preferences between two responses."""

MAY_IMPORT = ("config", "sharding", "parallel", "model")
