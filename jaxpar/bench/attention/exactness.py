"""The error of a backend, against attention in float32 of the same values."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxpar.bench.attention.shapes import Arrays
from jaxpar.kernels.attention import reference

#: Query rows whose scores are held at once.
ROWS = 256
#: A relative error above this means that something else was computed: bfloat16 gives 4e-3.
MAX_ERROR = 2e-2
#: The least root mean square that an error is relative to, values being standard normal: where each
#: query sees one key alone, dq and dk are 0 but for rounding. That of dq over 1,024 tokens is 0.1,
#: and falls no faster than the square root of their number rises.
MIN_RMS = 1e-3


def one_group(asked: Arrays, out, grads) -> tuple[Arrays, tuple]:
    """What belongs to the first row of the batch and its first KV head, with that head's queries.

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
    """out, dq, dk, dv in float32 at the highest precision, a block of query rows at a time."""
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
    """|found - wanted| / |wanted| over all elements, in float32; see LEAST_RMS."""
    found = found.astype(jnp.float32)
    whole = jnp.maximum(jnp.linalg.norm(wanted.ravel()), MIN_RMS * wanted.size**0.5)
    return jnp.linalg.norm((found - wanted).ravel()) / whole


def errors(part: tuple, wanted: tuple) -> dict[str, float]:
    """The relative L2 error of each of out, dq, dk, dv that was computed."""
    named = zip(("out", "dq", "dk", "dv"), part, wanted, strict=True)
    return {name: float(relative_l2(a, b)) for name, a, b in named if a is not None}


def wrong(found: dict[str, float]) -> str:
    """Which errors are too large or NaN, in words; empty when none is."""
    large = [f"{name} {e:.1e}" for name, e in found.items() if not e <= MAX_ERROR]
    return f"wrong result: relative error of {', '.join(large)}" if large else ""
