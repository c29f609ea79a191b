"""Optimized HLO, read."""
