"""Metrics, goodput, and the other records that a run writes."""

MAY_IMPORT = ("components", "config", "runtime", "model", "prediction")
