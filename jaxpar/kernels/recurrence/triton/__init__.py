"""Kernels of recurrences in Pallas (Triton). Start at `api.py`."""
