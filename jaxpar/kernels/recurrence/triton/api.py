"""Recurrences for NVIDIA GPUs, in Pallas (Triton): six kernels, three of them in the forward.

    within            [C, C] matrices of each chunk, all chunks at once      `within.py`
    states            the states between chunks, one chunk after the other   `forward.py`
    outputs           all chunks at once
    state_gradients   the gradients of states, from the last chunk           `backward.py`
    pair_gradients    between the tokens of a chunk, all chunks at once        `pairs.py`
    gradients         all chunks at once                                       `backward.py`

The forward keeps for the backward what the first two return. Where a remat policy does not save it,
the backward runs these two again, and `outputs` if it needs the result.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxpar.kernels.recurrence.chunks import Sums, chunks_in, sums_of
from jaxpar.kernels.recurrence.triton import backward, forward
from jaxpar.kernels.recurrence.triton.shape import RecurrenceShape
from jaxpar.kernels.recurrence.triton.within import pair_gradients, within_chunks

#: Most columns of V that a program has at a time: of the sequential kernels, whose programs should
#: fill a GPU, of `outputs`, and of the backward's others, by whether V is more than 128: a program
#: then loads several blocks. The fastest on an H200 (docs/experiments.md).
STATE_COLUMNS, OUT_COLUMNS, GRADIENT_COLUMNS = 32, 128, {False: 128, True: 64}


def delta_rule(q, k, v, log_decay, rate, begins, state, size: int, interpret: bool = False):
    """`recurrence.api.delta_rule`."""
    return _run(q, k, v, log_decay, rate, begins, state, size, interpret)


def state_space(q, k, v, log_decay, begins, state, size: int, interpret: bool = False):
    """`recurrence.api.state_space`."""
    return _run(q, k, v, log_decay, None, begins, state, size, interpret)


@functools.partial(jax.jit, static_argnums=(7, 8))
def _run(q, k, v, log_decay, rate, begins, state, size: int, interpret: bool):
    length = q.shape[1]
    more = chunks_in(length, size) * size - length
    padded = lambda x: jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    q, k, v = (padded(x) for x in (q, k, v))
    per_head = lambda x: jnp.moveaxis(padded(x), 1, 2)  # noqa: E731
    sums, document = _sums(per_head(log_decay), padded(begins.astype(jnp.int32)), size)
    rate = None if rate is None else per_head(rate)
    out, last = _recurrence(q, k, v, sums, rate, document, state, size, interpret)
    return out[:, :length].astype(jnp.float32), last


def _sums(log_decay, begins, size: int) -> tuple[Sums, jax.Array]:
    """Return the sums of each chunk, float32 [B, H, T], and documents in a chunk, int32 [B, T]."""
    chunks = lambda x: x.reshape(*x.shape[:-1], -1, size)  # noqa: E731
    sums = sums_of(chunks(log_decay), axis=-1)
    document = jnp.cumsum(chunks(begins), axis=-1, dtype=jnp.int32)
    return Sums(*(x.reshape(log_decay.shape) for x in sums)), document.reshape(begins.shape)


def _shape(q, v, rate, size: int, interpret: bool, columns: int) -> RecurrenceShape:
    B, T, G, K = q.shape
    H, V = v.shape[2:]
    block = math.gcd(V, columns)
    kind = q.dtype, rate is not None, interpret
    return RecurrenceShape(B, T // size, size, G, H, K, V, block, *kind)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _recurrence(q, k, v, sums, rate, document, state, size, interpret):
    return _forward(q, k, v, sums, rate, document, state, size, interpret)[0]


def _forward(q, k, v, sums, rate, document, state, size, interpret):
    shape = functools.partial(_shape, q, v, rate, size, interpret)
    sums = *sums, document
    scores, inverse = within_chunks(shape(v.shape[-1]), q, k, sums, rate)
    s = shape(STATE_COLUMNS)
    before, written, last = forward.states(s, k, v, sums, rate, inverse, state)
    out = forward.outputs(shape(OUT_COLUMNS), q, sums, scores, before, written)
    return (out, last), (q, k, v, sums, rate, scores, inverse, before, written)


def _backward(size, interpret, saved, cotangents):
    q, k, v, sums, rate, scores, inverse, before, written = saved
    d_out, d_last = cotangents
    shape = functools.partial(_shape, q, v, rate, size, interpret)
    s, matrices = shape(STATE_COLUMNS), (scores, inverse)
    found = backward.state_gradients(s, q, k, sums, rate, *matrices, d_out, d_last)
    d_states, d_written, d_first = found
    dv, solve, given = d_written, None, None
    s = shape(GRADIENT_COLUMNS[v.shape[-1] > 128])
    scores, own, of_rule = pair_gradients(s, v, sums, rate, d_out, written, d_written)
    if of_rule is not None:
        solve, dv, given = of_rule
    of_states, of_pairs = (before, written, d_states, d_written), (scores, own, solve)
    dq, dk, d_sums, d_rate = backward.gradients(s, q, k, sums, rate, d_out, *of_states, of_pairs)
    if given is not None:
        d_rate += given
    return dq, dk, dv, Sums(jnp.zeros_like(d_sums), d_sums), d_rate, None, d_first


_recurrence.defvjp(_forward, _backward)
