"""Elementwise kernels for Hopper GPUs and later, in Pallas (Mosaic GPU)."""
