"""Attention for Hopper GPUs, in Pallas."""
