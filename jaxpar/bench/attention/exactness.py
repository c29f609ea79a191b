"""Computes a backend's errors relative to float32 attention of the same values."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxpar.bench.attention.shapes import Arrays
from jaxpar.kernels.attention import reference

#: Query rows whose scores are stored at once.
ROWS = 256
#: Largest relative error of a correct result: bfloat16 gives 4e-3.
MAX_ERROR = 2e-2
#: Smallest root mean square that errors are relative to, for standard normal values. If each query
#: sees only one key, dq and dk are 0 up to rounding. The RMS of dq over 1,024 tokens is 0.1, and
#: decreases at most with the square root of their number.
MIN_RMS = 1e-3


def one_group(asked: Arrays, out, grads) -> tuple[Arrays, tuple]:
    """Return the first row's first KV head, with the queries of that head.

    Scores of all heads would not fit; every head and row is computed alike.
    """
    heads = asked.q.shape[2] // asked.k.shape[2]
    queries = lambda x: x[:1, :, :heads]  # noqa: E731
    keys = lambda x: x[:1, :, :1]  # noqa: E731
    mask = jax.tree.map(lambda x: x[:1], asked.mask)
    q, k, v, _, d_out = asked
    part = Arrays(queries(q), keys(k), keys(v), mask, queries(d_out))
    cut = (queries, queries, keys, keys)
    whole = (out, *(grads or (None, None, None)))
    return part, tuple(None if x is None else f(x) for f, x in zip(cut, whole, strict=True))


def exact(asked: Arrays) -> tuple:
    """Compute out, dq, dk, dv in float32 at the highest precision, in blocks of query rows."""
    q, k, v, mask, d_out = asked
    q, k, v, d_out = (x.astype(jnp.float32) for x in (q, k, v, d_out))
    rows_out, rows_dq = [], []
    dk, dv = jnp.zeros_like(k), jnp.zeros_like(v)
    with jax.default_matmul_precision("highest"):
        for begin in range(0, q.shape[1], ROWS):
            rows = slice(begin, begin + ROWS)
            part = replace(
                mask,
                q_positions=mask.q_positions[:, rows],
                q_segments=None if mask.q_segments is None else mask.q_segments[:, rows],
                in_order=False,
            )
            out, dq, dk_part, dv_part = _block(q[:, rows], k, v, part, d_out[:, rows])
            rows_out.append(out)
            rows_dq.append(dq)
            dk, dv = dk + dk_part, dv + dv_part
    return jnp.concatenate(rows_out, 1), jnp.concatenate(rows_dq, 1), dk, dv


@jax.jit
def _block(q, k, v, mask, d_out):
    out, lse = reference.forward(q, k, v, mask)
    return out, *reference.backward(q, k, v, mask, out, lse, d_out, jnp.zeros_like(lse))


@jax.jit
def relative_l2(found, wanted) -> jax.Array:
    """Return |found - wanted| / |wanted| over all elements, in float32; see MIN_RMS."""
    found = found.astype(jnp.float32)
    whole = jnp.maximum(jnp.linalg.norm(wanted.ravel()), MIN_RMS * wanted.size**0.5)
    return jnp.linalg.norm((found - wanted).ravel()) / whole


def errors(part: tuple, wanted: tuple) -> dict[str, float]:
    """Return the relative L2 error of each computed result."""
    named = zip(("out", "dq", "dk", "dv"), part, wanted, strict=True)
    return {name: float(relative_l2(a, b)) for name, a, b in named if a is not None}


def wrong(found: dict[str, float]) -> str:
    """Describe errors that are too large or NaN; empty if there are none."""
    large = [f"{name} {e:.1e}" for name, e in found.items() if not e <= MAX_ERROR]
    return f"wrong result: relative error of {', '.join(large)}" if large else ""
