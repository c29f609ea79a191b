"""Benchmarks the train step."""
