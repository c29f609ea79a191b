"""Counts what a recurrence computes and stores, per token and tensor rank.

These are estimates: no kernel of a recurrence was measured.
"""

from jaxpar.config import ModelConfig
from jaxpar.config.layout.layer_kinds import DELTA_NET


def recurrence_flops(m: ModelConfig, tensor: int) -> float:
    """Return the FLOPs of the forward per token: products within a chunk, and with the state."""
    C, K, V = m.recurrent_chunk, m.linear_key_head_dim, m.linear_value_head_dim
    within = C * (4 * K + (K + V) + 2 * V)
    return m.linear_num_value_heads / tensor * (within + 6 * K * V)


def recurrence_bytes(m: ModelConfig, tensor: int) -> float:
    """Return the float32 bytes per token that a recurrence's backward needs at once: its inputs,
    the matrices of each chunk and the states between chunks."""
    if m.layer_pattern != DELTA_NET:
        return 0.0
    C, K, V = m.recurrent_chunk, m.linear_key_head_dim, m.linear_value_head_dim
    return 4 * m.linear_num_value_heads / tensor * (6 * K + 4 * V + 4 * C + K * V / C)
