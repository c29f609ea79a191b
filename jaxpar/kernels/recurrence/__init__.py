"""Recurrences of a matrix for each head: Gated DeltaNet's and Mamba-2's. Start at `api.py`."""

from jaxpar.kernels.recurrence.api import BACKENDS, delta_rule, state_space
from jaxpar.kernels.recurrence.capability import Shape, choose, refusal

__all__ = ["BACKENDS", "Shape", "choose", "delta_rule", "refusal", "state_space"]
