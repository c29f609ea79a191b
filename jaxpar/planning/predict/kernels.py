"""Determines the attention kernels that a layout would use on a GPU that is not present."""

import dataclasses
import functools

import jax

from jaxpar.config import Config, DataConfig, ModelConfig, ParallelConfig, registry
from jaxpar.config.layout.layer_kinds import MAMBA, RECURRENT, has_kda, is_recurrent, of_masks
from jaxpar.kernels import recurrence
from jaxpar.kernels.attention import choose
from jaxpar.kernels.platform import Platform
from jaxpar.model.attention_context import attention_context, masks_of
from jaxpar.parallel.context import kernel_request
from jaxpar.planning.predict.hardware import Gpu
from jaxpar.planning.predict.shard import shard_of
from jaxpar.sharding.batch import Batch

#: Documents in a sequence; backends that mask by offset only need some limit.
SOME_DOCUMENTS = 64


def platform_of(gpu: Gpu) -> Platform:
    """Return the GPU as a platform for the choice of kernels."""
    return Platform("gpu", gpu.device_kind, gpu.compute_capability)


def attention_runs_on_reference(cfg: Config, gpu: Gpu) -> bool:
    """Return whether attention falls back to the reference, which stores all scores.

    Args:     cfg: resolved.
    Raises:   ValueError if `model.attention_backend` does not support the layout.
    """
    if registry.function("model.attention", cfg.model.attention):
        return True  # registered functions are unknown: assume that they store all scores
    return "reference" in attention_backends(cfg, gpu)


def attention_backends(cfg: Config, gpu: Gpu) -> frozenset[str]:
    """Return the backends of attention in a layout's forward and backward.

    Empty for attention that is registered outside the package. Args and Raises: as above.
    """
    if registry.function("model.attention", cfg.model.attention):
        return frozenset()
    p, rows = cfg.parallel, shard_of(cfg).rows
    return _chosen(cfg.model, cfg.data, (p.sequence, p.tensor, p.context), rows, gpu)


@functools.cache
def _chosen(
    model: ModelConfig, data: DataConfig, cut: tuple[int, int, str], rows: int, gpu: Gpu
) -> frozenset[str]:
    sequence, tensor, context = cut
    parallel = ParallelConfig(data=1, sequence=sequence, tensor=tensor, context=context)  # type: ignore[arg-type]
    cfg = Config(model=model, data=data, parallel=parallel)
    tokens = data.seq_len // sequence
    shape = jax.ShapeDtypeStruct((rows, tokens), "int32")
    describe = functools.partial(attention_context, cfg=cfg, max_segments=SOME_DOCUMENTS)
    described = jax.eval_shape(describe, Batch(shape, shape, shape, shape))
    masks = masks_of(described)
    exact = model.attention_deterministic
    choices = [
        choose(
            model.attention_backend,
            *kernel_request(dataclasses.replace(cfg, model=of_mask), mask),
            platform=platform_of(gpu),
            deterministic=exact,
            softcap=model.attention_softcap,
        )
        for of_mask, mask in zip(of_masks(model), masks, strict=True)
    ]
    return frozenset(name for c in choices for name in (c.forward, c.backward))


# ----- Counts what a recurrence computes and stores, per token and tensor rank. These are estimates


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
