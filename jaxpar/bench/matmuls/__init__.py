"""Matmul kernels, measured and chosen."""
