"""Update rules, moments, loss scale."""

MAY_IMPORT = ("config", "sharding", "parallel")
