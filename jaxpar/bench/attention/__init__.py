"""Benchmarks the attention backends."""
