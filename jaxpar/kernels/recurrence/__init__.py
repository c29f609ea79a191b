"""Recurrences of a matrix for each head: delta rules and Mamba-2's. Start at `api.py`."""

from jaxpar.kernels.recurrence.api import BACKENDS, delta_rule, state_space
from jaxpar.kernels.recurrence.by_channel import delta_rule_by_channel
from jaxpar.kernels.recurrence.capability import Shape, choose, refusal

__all__ = [
    "BACKENDS",
    "Shape",
    "choose",
    "delta_rule",
    "delta_rule_by_channel",
    "refusal",
    "state_space",
]
