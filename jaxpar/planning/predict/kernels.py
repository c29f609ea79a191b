"""Determines the attention kernels that a layout would use on a GPU that is not present."""

import dataclasses
import functools

import jax

from jaxpar.config import Config, DataConfig, ModelConfig, ParallelConfig, registry
from jaxpar.config.layout.layer_kinds import of_masks
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
