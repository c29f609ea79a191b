"""Traces of the profiler, read."""
