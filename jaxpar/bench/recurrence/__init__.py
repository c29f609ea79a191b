"""Measures the backends of recurrences, and those of flash-linear-attention beside them."""
