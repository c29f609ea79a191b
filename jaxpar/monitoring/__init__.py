"""Metrics, goodput, and the other records that a run writes."""

MAY_IMPORT = ("config", "runtime", "model", "planning")
