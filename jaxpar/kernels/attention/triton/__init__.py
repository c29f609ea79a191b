"""Attention kernels for NVIDIA GPUs since Ampere (compute capability 8.0), in Pallas (Triton)."""
