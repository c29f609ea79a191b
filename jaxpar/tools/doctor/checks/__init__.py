"""Checks: pure functions from facts and figures to findings."""
