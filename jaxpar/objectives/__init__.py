"""Training objectives beside or in place of next-token cross entropy: preferences, distillation."""

MAY_IMPORT = ("config", "sharding", "execution", "parallel", "model")
