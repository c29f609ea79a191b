"""What a run writes down while it runs."""

MAY_IMPORT = ("config", "runtime", "model", "planning")
