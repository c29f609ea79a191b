"""Attention kernels for Hopper GPUs, in Pallas."""
