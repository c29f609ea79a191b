"""Counts what a layer's attention, or the recurrence in its place, computes and stores.

Per token and tensor rank. What the recurrence takes is an estimate: no kernel of it was measured.
"""

from dataclasses import dataclass

from jaxpar.config import ModelConfig
from jaxpar.config.layout.layer_kinds import DELTA_NET
from jaxpar.model.recurrent.delta_net import column_sizes


@dataclass(frozen=True)
class Widths:
    """Elements per token and tensor rank.

    projected   of the product of the layer's input.
    heads       of the input of the output projection.
    rotated     of queries and keys, again after RoPE.
    scores      numbers of each head that attention keeps: its log-sum-exp.
    """

    projected: float
    heads: float
    rotated: float
    scores: float


def widths(m: ModelConfig, tensor: int) -> Widths:
    """Return the widths of layers that are all of one kind."""
    if m.layer_pattern == DELTA_NET:
        columns = column_sizes(m, tensor)
        return Widths(sum(columns), columns[3], 0.0, 0.0)
    heads, kv = m.num_heads * m.head_dim / tensor, m.num_kv_heads * m.head_dim / tensor
    gate = heads if m.attention_gate else 0.0
    return Widths(heads + 2 * kv + gate, heads, heads + kv, m.num_heads / tensor)


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
