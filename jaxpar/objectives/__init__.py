"""What a run trains: losses of tokens, and what all training objectives have in common."""

MAY_IMPORT = ("config", "sharding", "execution", "parallel", "model", "data")
