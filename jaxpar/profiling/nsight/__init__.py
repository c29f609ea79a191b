"""Measures single kernels of a step with NVIDIA's Nsight Compute, and marks steps for its tools."""
