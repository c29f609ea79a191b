"""A run's report: one HTML file that needs nothing else, from the run's folder."""

MAY_IMPORT = ("config", "runtime", "monitoring", "bench")
