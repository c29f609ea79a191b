"""Reads what a compiled program sends between devices, from its optimized HLO."""
