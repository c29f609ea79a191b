"""Update rules, learning-rate schedules, moments and loss scaling."""

MAY_IMPORT = ("config", "sharding", "parallel")
