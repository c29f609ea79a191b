"""Do the chosen kernels compute attention on this very device? Asked once, before the first step.

A kernel that is wrong for a shape, a driver or a version gives no error: the loss falls, only less.
So a small slice of the run's own masks goes through the chosen kernels and through `reference` in
float32.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.kernels.attention import api
from jaxpar.kernels.attention.dispatch.choice import Choice
from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.step.compiled import FirstRunAlone

#: Tokens of a slice: several blocks of any kernel, and scores of 4 MB a head.
SLICE = 1024

#: Tokens in a block; out and gradients are compared block by block, by relative L2 norm.
BLOCK = 64

#: How far off each may be: five times what rounding to bfloat16 gives.
BOUND = 2e-2

#: The log-sum-exp is float32 in every backend: the largest difference, absolute.
LSE_BOUND = 1e-3

#: The least root mean square that an error is relative to: that of dq over 1024 causal tokens, when
#: q, k, v and d_out have 1. A query that sees one key has a gradient of 0, and an error relative to
#: that would be rounding over nothing.
MIN_RMS = 0.1

_REFERENCE = Choice("reference", "reference")

NAMES = ("out", "lse", "dq", "dk", "dv")

#: The programs run once: XLA's search for their fastest kernels takes longer than all else here.
_QUICKLY = {"xla_gpu_autotune_level": 0}


class WrongKernel(Exception):
    """A kernel does not compute what `reference` computes."""


@dataclass(frozen=True)
class Report:
    """Errors and their bounds, by array."""

    errors: dict[str, float]
    bounds: dict[str, float]

    def __str__(self) -> str:
        """ "out 2.1e-03, lse 4.0e-07, ..."."""
        return ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())


def check(choice: Choice, q, k, v, mask: AttentionMask, d_out) -> Report:
    """Compare the chosen kernels, forward and backward, with `reference` in float32.

    Runs to its end, and alone on its device (`FirstRunAlone`), before it returns.

    Args:     q, d_out: [B, T, H, K]; k, v: [B, S, G, K], all on one device.
    Raises:   WrongKernel naming each array that is off, by how much, and its bound.
    """
    got = _run(choice, q, k, v, mask, d_out)
    upcast = [x.astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):  # float32, not TF32
        wanted = _run(_REFERENCE, *upcast, mask, d_out.astype(jnp.float32))
    errors = {
        name: (_largest if name == "lse" else _relative)(got[name], wanted[name]) for name in NAMES
    }
    bounds = {name: LSE_BOUND if name == "lse" else BOUND for name in NAMES}
    report = Report(errors, bounds)
    # A NaN is not below anything.
    wrong = [name for name in NAMES if not errors[name] <= bounds[name]]
    if wrong:
        raise WrongKernel(_describe(choice, report, wrong))
    return report


def random_values(mask: AttentionMask, group: int, head_dim: int, dtype, seed: int):
    """q, k, v, d_out for a mask: one KV head and its group of query heads, standard normal.

    Returns:  numpy arrays; q, d_out: [B, T, group, K]; k, v: [B, S, 1, K].
    """
    rng = np.random.default_rng(seed)

    def normal(positions, heads: int):
        return rng.normal(size=(*positions.shape, heads, head_dim)).astype(jnp.dtype(dtype))

    queries, keys = (mask.q_positions, group), (mask.kv_positions, 1)
    return normal(*queries), normal(*keys), normal(*keys), normal(*queries)


def slice_of(length: int, in_order: bool) -> np.ndarray:
    """The places of a slice: the first SLICE ones, or in another order than the text's both ends.

    A shard in zigzag order ends with late tokens, so that the slice is in zigzag order too.
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
    """Of the worst block: early tokens, with few keys, would drown an error in late ones."""

    def of_block(tokens: slice):
        off, whole = found[:, tokens] - wanted[:, tokens], wanted[:, tokens]
        return np.linalg.norm(off) / max(np.linalg.norm(whole), MIN_RMS * whole.size**0.5)

    starts = range(0, wanted.shape[1], BLOCK)
    return float(np.max([of_block(slice(start, start + BLOCK)) for start in starts]))


def _largest(found, wanted) -> float:
    # A row that sees no key has EMPTY_LSE; a finite one in its place is far off.
    return float(np.abs(found - wanted).max())


def _describe(choice: Choice, report: Report, wrong: list[str]) -> str:
    off = [f"{n} is off by {report.errors[n]:.1e} (at most {report.bounds[n]:.1e})" for n in wrong]
    kernels = f"forward {choice.forward}, backward {choice.backward}"
    device = jax.local_devices()[0].device_kind
    return f"{kernels} disagree with reference in float32 on {device}: {', '.join(off)}"
