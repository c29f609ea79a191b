"""Attention: `attention(q, k, v, mask, backend=...) -> (out, lse)`. Start at `api.py`."""

from jaxpar.kernels.attention.api import attention, backend_for, backward, explain, forward
from jaxpar.kernels.attention.mask import AttentionMask

__all__ = ["AttentionMask", "attention", "backend_for", "backward", "explain", "forward"]
