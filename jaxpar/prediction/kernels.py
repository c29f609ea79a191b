"""Determines the kernels that a layout would use on a GPU that is not present."""

import dataclasses
import functools

import jax

from jaxpar.components.recurrent import Recurrent
from jaxpar.config import ComputeConfig, Config, DataConfig, Model, ParallelConfig
from jaxpar.kernels.attention import choose
from jaxpar.kernels.platform import Platform
from jaxpar.model.attention_context import attention_layers, heads_of, masks_of
from jaxpar.parallel.context import kernel_request
from jaxpar.prediction.hardware import Gpu
from jaxpar.prediction.shard import shard_of
from jaxpar.sharding.batch import Batch

#: Documents in a sequence; backends that mask by offset only need some limit.
SOME_DOCUMENTS = 64


def platform_of(gpu: Gpu) -> Platform:
    """Return the GPU as a platform for the choice of kernels."""
    return Platform("gpu", gpu.device_kind, gpu.compute_capability)


def attention_runs_on_reference(cfg: Config, gpu: Gpu) -> bool:
    """Return whether attention falls back to the reference, which stores all scores.

    Args:     cfg: resolved.
    Raises:   ValueError if `compute.attention_backend` does not support the layout.
    """
    mixers = (layer.mixer for layer in cfg.model.layers)
    if any(one and one.attention_heads and one.attention_heads.is_own for one in mixers):
        return True  # functions of users are unknown: assume that they store all scores
    return "reference" in attention_backends(cfg, gpu)


def attention_backends(cfg: Config, gpu: Gpu) -> frozenset[str]:
    """Return the backends of attention in a layout's forward and backward.

    Empty without softmax attention. Args and Raises: as above.
    """
    p, rows = cfg.parallel, shard_of(cfg).rows
    return _chosen(cfg.model, cfg.compute, cfg.data, (p.sequence, p.tensor, p.context), rows, gpu)


@functools.cache
def _chosen(
    model: Model,
    compute: ComputeConfig,
    data: DataConfig,
    cut: tuple[int, int, str],
    rows: int,
    gpu: Gpu,
) -> frozenset[str]:
    sequence, tensor, context = cut
    parallel = ParallelConfig(data=1, sequence=sequence, tensor=tensor, context=context)  # type: ignore[arg-type]
    cfg = Config(model=model, compute=compute, data=data, parallel=parallel)
    tokens = data.seq_len // sequence
    shape = jax.ShapeDtypeStruct((rows, tokens), "int32")
    describe = functools.partial(masks_of, cfg=cfg, max_segments=SOME_DOCUMENTS)
    masks = jax.eval_shape(describe, Batch(shape, shape, shape, shape))
    heads = map(heads_of, attention_layers(model))
    choices = [
        choose(
            compute.attention_backend,
            *kernel_request(cfg, mask, of.queries, of.keys, of.key_dim),
            platform=platform_of(gpu),
            deterministic=compute.attention_deterministic,
            softcap=of.softcap,
        )
        for of, mask in zip(heads, masks, strict=True)
    ]
    return frozenset(name for c in choices for name in (c.forward, c.backward))


def with_backend(cfg: Config, platform: Platform) -> Config:
    """Return the config with the backend that `compute.recurrent_backend` auto takes on a platform.

    The reference, unless kernels compute every recurrence of the model.
    """
    c, layers = cfg.compute, cfg.model.layers
    mixers = {layer.mixer for layer in layers if isinstance(layer.mixer, Recurrent)}
    if c.recurrent_backend != "auto" or not mixers:
        return cfg
    from jaxpar.kernels import recurrence

    shapes = [recurrence.Shape(one.chunk, *one.state[1:], c.dtype) for one in mixers]
    chosen = {recurrence.choose("auto", shape, platform) for shape in shapes}
    kernels = all(one.has_kernels for one in mixers) and chosen == {"triton"}
    there = dataclasses.replace(c, recurrent_backend="triton" if kernels else "reference")
    return dataclasses.replace(cfg, compute=there)


def by_kernels(compute: ComputeConfig) -> bool:
    """Return whether kernels compute recurrences, after `with_backend`."""
    return compute.recurrent_backend == "triton"
