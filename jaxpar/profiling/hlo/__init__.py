"""Optimised HLO, read."""
