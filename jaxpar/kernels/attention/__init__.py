"""Attention: `attention(q, k, v, mask, backend=...) -> (out, lse)`. Start at `api.py`."""

from jaxpar.kernels.attention.api import attention, backward, forward
from jaxpar.kernels.attention.choice import Choice, choose, explain
from jaxpar.kernels.attention.mask import AttentionMask, check_arguments

__all__ = [
    "AttentionMask",
    "Choice",
    "attention",
    "backward",
    "check_arguments",
    "choose",
    "explain",
    "forward",
]
