"""Counts what a recurrence computes and stores, per token and tensor rank. These are estimates."""

import dataclasses

from jaxpar.config import Config, ModelConfig
from jaxpar.config.layout.layer_kinds import MAMBA, RECURRENT, has_kda, is_recurrent
from jaxpar.kernels import recurrence
from jaxpar.kernels.platform import Platform


def _sizes(m: ModelConfig, tensor: int) -> tuple[float, int, int, float]:
    """Return heads, the sizes [K, V] of a state, and products of a chunk's tokens per head."""
    if m.layer_pattern != MAMBA:
        heads = m.linear_num_value_heads / tensor
        return heads, m.linear_key_head_dim, m.linear_value_head_dim, 2.0
    shared = m.mamba_num_groups / m.mamba_num_heads
    return m.mamba_num_heads / tensor, m.mamba_state_size, m.mamba_head_dim, shared


def with_backend(cfg: Config, platform: Platform) -> Config:
    """Return the config with the backend that `model.recurrent_backend` auto takes on a platform.

    The reference, unless kernels compute every recurrence of the model. Kimi Delta Attention has
    none.
    """
    m = cfg.model
    if m.recurrent_backend != "auto" or not is_recurrent(m):
        return cfg
    reference = dataclasses.replace(m, recurrent_backend="reference")
    if has_kda(m):
        return dataclasses.replace(cfg, model=reference)
    one_kind = (dataclasses.replace(m, layer_pattern=k) for k in RECURRENT if k in m.layer_pattern)
    shapes = [
        recurrence.Shape(m.recurrent_chunk, *_sizes(kind, 1)[1:3], m.dtype) for kind in one_kind
    ]
    if {recurrence.choose("auto", shape, platform) for shape in shapes} == {"triton"}:
        return dataclasses.replace(cfg, model=dataclasses.replace(m, recurrent_backend="triton"))
    return dataclasses.replace(cfg, model=reference)


def by_kernels(m: ModelConfig) -> bool:
    """Return whether kernels compute the model's recurrences, after `with_backend`."""
    return m.recurrent_backend == "triton"


def recurrence_flops(m: ModelConfig, tensor: int) -> float:
    """Return the FLOPs of the forward per token: products within a chunk, and with the state."""
    heads, K, V, products = _sizes(m, tensor)
    solved = K + V if m.layer_pattern != MAMBA else 0
    within = m.recurrent_chunk * (2 * products * K + solved + 2 * V)
    return heads * (within + (6 if solved else 4) * K * V)


def recurrence_bytes(m: ModelConfig, tensor: int) -> float:
    """Return the bytes per token that a recurrence's backward needs at once: its inputs, the
    matrices of each chunk and the states between chunks, in float32. Decays of each channel have
    sums and factors besides.

    With kernels, in 16 bits: the matrices of each chunk, states and their gradients, and what
    tokens write and read.
    """
    if not is_recurrent(m):
        return 0.0
    heads, K, V, products = _sizes(m, tensor)
    C = m.recurrent_chunk
    if by_kernels(m):
        matrices = 2 if m.layer_pattern != MAMBA else 1
        return 2 * heads * (matrices * C + 2 * K * V / C + 3 * V)
    by_channel = 5 * K if has_kda(m) else 0
    inputs = 3 * products * K + 4 * V + by_channel
    return 4 * heads * (inputs + 2 * (1 + products) * C + K * V / C)
