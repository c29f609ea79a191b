"""Selects a run's attention kernels, and tests them before the first step."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxpar.config import Config, ConfigError, registry
from jaxpar.config.layout.layer_kinds import of_masks
from jaxpar.data.loader import Loader
from jaxpar.kernels.attention import AttentionMask, Choice, choose
from jaxpar.model.attention_context import attention_context
from jaxpar.parallel.context import kernel_request
from jaxpar.sharding.batch import Batch
from jaxpar.training.selftests import attention as attention_selftest


def masks_of(batch: Batch, cfg: Config, max_segments: int) -> tuple[AttentionMask, ...]:
    """Return the attention masks of a batch: one for each kind of layer, global layers last."""
    context = attention_context(batch, cfg, max_segments)
    if context.in_global is None:
        return (context.mask,)
    return context.mask, context.in_global.mask


def configs_of_masks(cfg: Config) -> list[Config]:
    """Return the config with the heads of each of `masks_of`."""
    return [dataclasses.replace(cfg, model=m) for m in of_masks(cfg.model)]


def choose_kernels(cfg: Config, max_segments: int) -> tuple[Choice, ...]:
    """Choose the attention kernels and give the reasons: one choice for each kind of layer.

    Empty for an attention function registered by the user, whose kernels are unknown.

    Args:     cfg: resolved. max_segments: maximum number of documents in a sequence.
    Raises:   ConfigError when `model.attention_backend` cannot compute this attention.
    """
    m, p = cfg.model, cfg.parallel
    if registry.function("model.attention", m.attention):
        return ()
    ways = p.replica * p.data * p.expert * p.num_microbatches
    shard = (cfg.train.global_batch_size // ways, cfg.data.seq_len // p.sequence)
    rows = jax.ShapeDtypeStruct(shard, "int32")
    describe = functools.partial(masks_of, cfg=cfg, max_segments=max_segments)
    masks = jax.eval_shape(describe, Batch(rows, rows, rows, rows))
    requests = map(kernel_request, configs_of_masks(cfg), masks)
    name = m.attention_backend
    options = {"deterministic": m.attention_deterministic, "softcap": m.attention_softcap}
    try:
        return tuple(choose(name, *request, **options) for request in requests)  # type: ignore[arg-type]
    except ValueError as error:
        fix = "use --model.attention-backend auto"
        raise ConfigError("model.attention_backend", name, str(error), fix) from error


def test_kernels(
    kernels: Sequence[Choice],
    cfg: Config,
    loader: Loader,
    max_segments: int,
    step: int,
    log: Callable[[str], None],
) -> None:
    """Compare the kernels with `reference` on a slice of the run's next batch, on one device.

    Args:     kernels: from `choose_kernels`. step: steps taken so far. log: prints a line.
    Raises:   ConfigError when they disagree.
    """
    if not kernels:
        return
    first_row = loader.host_rows(step, np.zeros(1, np.int64))
    p = cfg.parallel
    in_text_order = p.sequence == 1 or p.context == "ulysses"
    length = cfg.data.seq_len // (1 if in_text_order else p.sequence)
    places = attention_selftest.slice_of(length, in_text_order)
    describe = jax.jit(functools.partial(masks_of, cfg=cfg, max_segments=max_segments))
    masks = describe(jax.tree.map(lambda x: x[:, places], first_row))
    for choice, mask, of_mask in zip(kernels, masks, configs_of_masks(cfg), strict=True):
        _test_choice(choice, mask, of_mask, log)


def _test_choice(
    choice: Choice, mask: AttentionMask, cfg: Config, log: Callable[[str], None]
) -> None:
    if {choice.forward, choice.backward} == {"reference"}:
        return  # there is nothing to compare; the run's summary names the kernels
    began, m = time.perf_counter(), cfg.model
    group = m.num_heads // m.num_kv_heads
    shape = mask, group, m.head_dim, m.dtype, cfg.train.seed, m.value_dim
    values = attention_selftest.random_values(*shape)
    q, k, v, d_out, mask = jax.device_put((*values, mask), jax.local_devices()[0])
    try:
        report = attention_selftest.check(choice, q, k, v, mask, d_out)
    except attention_selftest.WrongKernel as error:
        fix = "use --model.attention-backend reference or another backend, and report the bug"
        name = m.attention_backend
        raise ConfigError("model.attention_backend", name, str(error), fix) from error
    log(f"attention self-test: {report}, {time.perf_counter() - began:.1f} s")
