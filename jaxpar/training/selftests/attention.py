"""Chooses a run's attention kernels, and tests them on this device once, before the first step.

A kernel that is wrong for a shape, a driver or a version raises no error: the loss still falls, but
less. The test therefore runs a small slice with the run's own masks through the chosen kernels, and
through `reference` in float32.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.components.costs import Heads
from jaxpar.config import Config, ConfigError
from jaxpar.data.loader import Loader
from jaxpar.kernels.attention import AttentionMask, Choice, api, choose
from jaxpar.model.attention_context import attention_layers, heads_of, masks_of
from jaxpar.parallel.context import kernel_request
from jaxpar.sharding.batch import Batch
from jaxpar.step.compiled import FirstRunAlone


def choose_kernels(cfg: Config, max_segments: int) -> tuple[Choice, ...]:
    """Choose the attention kernels and give the reasons: one choice for each kind of layer.

    None for an attention function of a user, whose kernels are unknown.

    Args:     cfg: resolved. max_segments: maximum number of documents in a sequence.
    Raises:   ConfigError when `compute.attention_backend` cannot compute this attention.
    """
    m, p = cfg.model, cfg.parallel
    heads = [*map(heads_of, attention_layers(m))]
    ways = p.replica * p.data * p.expert * p.num_microbatches
    shard = (cfg.train.global_batch_size // ways, cfg.data.seq_len // p.sequence)
    rows = jax.ShapeDtypeStruct(shard, "int32")
    describe = functools.partial(masks_of, cfg=cfg, max_segments=max_segments)
    masks = jax.eval_shape(describe, Batch(rows, rows, rows, rows))
    name, exact = cfg.compute.attention_backend, cfg.compute.attention_deterministic
    try:
        return tuple(
            choose(
                name,
                *kernel_request(cfg, mask, of.queries, of.keys, of.key_dim),
                deterministic=exact,
                softcap=of.softcap,
            )
            for of, mask in zip(heads, masks, strict=True)
        )
    except ValueError as error:
        fix = "use --compute.attention-backend auto"
        raise ConfigError("compute.attention_backend", name, str(error), fix) from error


def test_kernels(
    kernels: Sequence[Choice],
    cfg: Config,
    loader: Loader,
    max_segments: int,
    step: int,
    log: Callable[[str], None],
) -> dict[str, float]:
    """Compare the kernels with `reference` on a slice of the run's next batch, on one device.

    Args:     kernels: from `choose_kernels`. step: steps taken so far. log: prints a line.
    Returns:  the largest error of each array; {} if all layers run the reference.
    Raises:   ConfigError when they disagree.
    """
    if not kernels:
        return {}
    first_row = loader.host_rows(step, np.zeros(1, np.int64))
    p = cfg.parallel
    in_text_order = p.sequence == 1 or p.context == "ulysses"
    length = cfg.data.seq_len // (1 if in_text_order else p.sequence)
    places = slice_of(length, in_text_order)
    describe = jax.jit(functools.partial(masks_of, cfg=cfg, max_segments=max_segments))
    masks = describe(jax.tree.map(lambda x: x[:, places], first_row))
    worst: dict[str, float] = {}
    for choice, mask, layer in zip(kernels, masks, attention_layers(cfg.model), strict=True):
        for name, error in _test_choice(choice, mask, heads_of(layer), cfg, log).items():
            worst[name] = max(error, worst.get(name, 0.0))
    return worst


def _test_choice(
    choice: Choice, mask: AttentionMask, of: Heads, cfg: Config, log: Callable[[str], None]
) -> dict[str, float]:
    if {choice.forward, choice.backward} == {"reference"}:
        return {}  # there is nothing to compare; the run's summary names the kernels
    began, c = time.perf_counter(), cfg.compute
    group = of.queries // of.keys
    shape = mask, group, of.key_dim, c.dtype, cfg.train.seed, of.value_dim
    values = random_values(*shape)
    q, k, v, d_out, mask = jax.device_put((*values, mask), jax.local_devices()[0])
    try:
        errors = check(choice, q, k, v, mask, d_out)
    except WrongKernel as error:
        fix = "use --compute.attention-backend reference or another backend, and report the bug"
        name = c.attention_backend
        raise ConfigError("compute.attention_backend", name, str(error), fix) from error
    found = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    log(f"attention self-test: {found}, {time.perf_counter() - began:.1f} s")
    return errors


#: Tokens in the slice: several blocks of any kernel, with 4 MB of scores per head.
SLICE = 1024

#: Tokens in a block. Output and gradients are compared block by block, by relative L2 norm.
BLOCK = 64

#: Maximum relative error of a block: five times the error of rounding to bfloat16.
BOUND = 2e-2

#: Maximum absolute error of the log-sum-exp, which is float32 in every backend.
LSE_BOUND = 1e-3

#: Errors are relative to at least this root mean square: that of dq over 1024 causal tokens when q,
#: k, v and d_out have 1. The gradient of a query that attends to one key is 0; relative to that,
#: any rounding error would be infinite.
MIN_RMS = 0.1

_REFERENCE = Choice("reference", "reference")

NAMES = ("out", "lse", "dq", "dk", "dv")
BOUNDS = {name: LSE_BOUND if name == "lse" else BOUND for name in NAMES}

#: The programs run once. Autotuning them would take longer than the rest of the test.
_QUICKLY = {"xla_gpu_autotune_level": 0}


class WrongKernel(Exception):
    """A kernel disagrees with `reference`."""


def check(choice: Choice, q, k, v, mask: AttentionMask, d_out) -> dict[str, float]:
    """Compare the chosen kernels, forward and backward, with `reference` in float32.

    Blocks until the result is ready. No other program runs on the device meanwhile
    (`FirstRunAlone`).

    Args:     q: [B, T, H, K]; d_out: [B, T, H, I]; k: [B, S, G, K]; v: [B, S, G, I], all on one
              device.
    Returns:  the error of each array.
    Raises:   WrongKernel that names each wrong array, its error and its bound.
    """
    got = _run(choice, q, k, v, mask, d_out)
    upcast = [x.astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):  # float32, not TF32
        exact = dataclasses.replace(_REFERENCE, softcap=choice.softcap)
        wanted = _run(exact, *upcast, mask, d_out.astype(jnp.float32))
    errors = {
        name: (_largest if name == "lse" else _relative)(got[name], wanted[name]) for name in NAMES
    }
    # `not <=` rather than `>`: a NaN is wrong, too.
    wrong = [name for name in NAMES if not errors[name] <= BOUNDS[name]]
    if wrong:
        raise WrongKernel(_describe(choice, errors, wrong))
    return errors


def random_values(
    mask: AttentionMask, group: int, head_dim: int, dtype, seed: int, value_dim: int | None = None
):
    """Draw q, k, v, d_out for a mask: one KV head and its group of query heads, standard normal.

    Args:     head_dim: K, of q and k. value_dim: I, of v and d_out; None for K.
    Returns:  numpy arrays; q: [B, T, group, K]; k: [B, S, 1, K]; v: [B, S, 1, I]; d_out: [B, T,
              group, I].
    """
    rng = np.random.default_rng(seed)

    def normal(positions, heads: int, dim: int | None):
        return rng.normal(size=(*positions.shape, heads, dim or head_dim)).astype(jnp.dtype(dtype))

    queries, keys = (mask.q_positions, group), (mask.kv_positions, 1)
    return (
        *(normal(*queries, head_dim), normal(*keys, head_dim)),
        *(normal(*keys, value_dim), normal(*queries, value_dim)),
    )


def slice_of(length: int, in_order: bool) -> np.ndarray:
    """Return the positions of the slice: the first SLICE, or half from each end if not in order.

    A shard in zigzag order ends with late tokens, so the slice is in zigzag order, too.
    """
    places = np.arange(length)
    if length <= SLICE or in_order:
        return places[:SLICE]
    return np.concatenate([places[: SLICE // 2], places[-(SLICE // 2) :]])


def _run(choice: Choice, *arguments) -> dict[str, np.ndarray]:
    program = jax.jit(functools.partial(_all_arrays, choice), compiler_options=_QUICKLY)
    found = jax.device_get(FirstRunAlone(program)(*arguments))
    return {name: np.asarray(x, np.float64) for name, x in zip(NAMES, found, strict=True)}


def _all_arrays(choice: Choice, q, k, v, mask, d_out):
    out, lse = api.forward(q, k, v, mask, choice)
    grads = api.backward(q, k, v, mask, out, lse, d_out, jnp.zeros_like(lse), choice)
    return out, lse, *grads


def _relative(found, wanted) -> float:
    """Return the error of the worst block.

    Over all tokens, the large gradients of early tokens would hide an error in late ones.
    """

    def of_block(tokens: slice):
        off, whole = found[:, tokens] - wanted[:, tokens], wanted[:, tokens]
        return np.linalg.norm(off) / max(np.linalg.norm(whole), MIN_RMS * whole.size**0.5)

    starts = range(0, wanted.shape[1], BLOCK)
    return float(np.max([of_block(slice(start, start + BLOCK)) for start in starts]))


def _largest(found, wanted) -> float:
    # A row that attends to no key has EMPTY_LSE; any ordinary value there is far off.
    return float(np.abs(found - wanted).max())


def _describe(choice: Choice, errors: dict[str, float], wrong: list[str]) -> str:
    off = [f"{n} is off by {errors[n]:.1e} (at most {BOUNDS[n]:.1e})" for n in wrong]
    kernels = f"forward {choice.forward}, backward {choice.backward}"
    device = jax.local_devices()[0].device_kind
    return f"{kernels} disagree with reference in float32 on {device}: {', '.join(off)}"
