"""The recurrences in plain JAX, in chunks. All platforms run it.

Products have operands in the dtype of queries, keys and values, and add up in float32. In float16,
whose range a state or its gradient may leave, operands are float32. The state is float32. Only what
needs the state before a chunk is sequential: with `delta_rule` two products, with `state_space` a
sum.

Within a chunk, the writes u_t = b_t (v_t - a_t S_{t-1}^T k_t) of the delta rule depend on one
another linearly. They solve a triangular system, whose right-hand side is linear in the state
before the chunk:

    (I + A) u = b v - (b k c) S        A_ij = b_i (k_i . k_j) decay_ij for j < i

H = G R heads: R heads share the queries and keys of each of G. C tokens a chunk, N chunks.

Source:   Yang et al. 2024 (2412.06464), Gated Delta Networks, section 3; Yang et al. 2024
          (2406.06484) for chunks; Dao & Gu 2024 (2405.21060), section 6, for `state_space`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels.recurrence.chunks import decays, in_chunks, in_sequence, unit_lower_inverse

f32 = jnp.float32


class _Chunks(NamedTuple):
    """Each chunk, [N, B, G, R, ...], and float32 unless q's dtype is noted."""

    queries: jax.Array
    keys: jax.Array
    """[N, B, G, C, K] in q's dtype."""
    values: jax.Array
    """[C, V]."""
    between: jax.Array
    """[C, C]."""
    since_start: jax.Array
    until_end: jax.Array
    """[C, 1]."""
    of_chunk: jax.Array
    """[1, 1]."""

    def scores(self) -> jax.Array:
        """[C, C]: products of queries and keys, times the decay between them."""
        return self.products(self.queries) * self.between

    def products(self, a: jax.Array) -> jax.Array:
        """[N, B, G, 1, C, C]: products of [N, B, G, C, K] and keys."""
        return product("nbgik,nbgjk->nbgij", a, self.keys)[:, :, :, None]

    def out(self, states: jax.Array, written: jax.Array) -> jax.Array:
        """Read [N, B, H, C, V] of the states before chunks, and of what tokens wrote."""
        earlier = product("nbgik,nbgrkv->nbgriv", self.queries, states)
        own = product("nbgrij,nbgrjv->nbgriv", self.scores().astype(self.keys.dtype), written)
        out = self.since_start * earlier + own
        return out.reshape(*out.shape[:2], -1, *out.shape[4:])


def delta_rule(q, k, v, log_decay, rate, begins, state, size: int):
    """`api.delta_rule`."""
    q, k, v = operands(q, k, v)
    x, dtype = _chunks(q, k, v, log_decay, begins, size), k.dtype
    rate = _by_group(in_chunks(rate, size)[..., None], k.shape[2])
    below = jnp.tril(rate * x.products(x.keys) * x.between, -1)
    solve = unit_lower_inverse(below).astype(dtype)
    solved = lambda a: product("nbgrij,nbgrjk->nbgrik", solve, a.astype(dtype))  # noqa: E731
    reads = solved(rate * x.since_start * x.keys[:, :, :, None].astype(f32)).astype(dtype)
    writes, keys = solved(rate * x.values), x.until_end * x.keys[:, :, :, None].astype(f32)

    chunks = reads, writes, keys.astype(dtype), x.of_chunk
    before, written, state = states_between_chunks(*chunks, _grouped(state, k.shape[2]))
    out = in_sequence(x.out(before, written), q.shape[1])
    return out, state.reshape(v.shape[0], -1, *state.shape[3:])


@jax.custom_vjp
def states_between_chunks(reads, writes, keys, of_chunk, state):
    """Run the sequential part of the delta rule: u = writes - reads S, S' = d S + keys^T u.

    Its derivative is written out, so that loops hold no more than what is sequential: of each chunk
    two products. All others follow for all chunks at once.

    Args:     reads, keys: [N, B, G, R, C, K]. writes: float32 [N, B, G, R, C, V]. of_chunk: float32
              [N, B, G, R, 1, 1], or [N, B, G, R, K, 1] for decays of each channel. state: float32
              [B, G, R, K, V].
    Returns:  the states before chunks and u, in the dtype of keys; the last state, float32.
    """

    def one(state, chunk):
        reads, writes, keys, of_chunk = chunk
        before = state.astype(keys.dtype)
        written = writes - product("bgrik,bgrkv->bgriv", reads, before)
        added = product("bgrik,bgriv->bgrkv", keys, written.astype(keys.dtype))
        return of_chunk * state + added, before

    last, before = lax.scan(one, state, (reads, writes, keys, of_chunk))
    written = writes - product("nbgrik,nbgrkv->nbgriv", reads, before)
    return before, written.astype(keys.dtype), last


def _states_forward(reads, writes, keys, of_chunk, state):
    before, written, last = states_between_chunks(reads, writes, keys, of_chunk, state)
    return (before, written, last), (reads, keys, of_chunk, before, written)


def _states_backward(saved, cotangents):
    reads, keys, of_chunk, before, written = saved
    d_before, d_written, d_last = cotangents
    dtype = keys.dtype

    def one(d_state, chunk):
        reads, keys, of_chunk, d_before, d_written = chunk
        after = d_state.astype(dtype)
        d_u = d_written + product("bgrik,bgrkv->bgriv", keys, after)
        read = product("bgrik,bgriv->bgrkv", reads, d_u.astype(dtype))
        return of_chunk * d_state + d_before - read, after

    given = reads, keys, of_chunk, d_before, d_written
    d_state, after = lax.scan(one, d_last, given, reverse=True)
    d_writes = d_written + product("nbgrik,nbgrkv->nbgriv", keys, after)
    d_reads = -product("nbgriv,nbgrkv->nbgrik", d_writes.astype(dtype), before)
    d_keys = product("nbgriv,nbgrkv->nbgrik", written, after)
    alike = tuple(axis for axis in (-2, -1) if of_chunk.shape[axis] == 1)
    d_of_chunk = jnp.sum(before.astype(f32) * after, axis=alike, keepdims=True)
    return d_reads.astype(dtype), d_writes, d_keys.astype(dtype), d_of_chunk, d_state


states_between_chunks.defvjp(_states_forward, _states_backward)


def state_space(q, k, v, log_decay, begins, state, size: int):
    """`api.state_space`."""
    q, k, v = operands(q, k, v)
    x, dtype = _chunks(q, k, v, log_decay, begins, size), k.dtype
    written = (x.until_end * x.values).astype(dtype)
    added = product("nbgjk,nbgrjv->nbgrkv", x.keys, written)

    def one(state, chunk):
        of_chunk, added = chunk
        return of_chunk * state + added, state.astype(dtype)

    state, states = lax.scan(one, _grouped(state, k.shape[2]), (x.of_chunk, added))
    out = x.out(states, x.values.astype(dtype))
    return in_sequence(out, q.shape[1]), state.reshape(v.shape[0], -1, *state.shape[3:])


def operands(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the operands of products of arrays: in float32 if they are in float16."""
    return tuple(a.astype(f32) if a.dtype == jnp.float16 else a for a in arrays)


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply arrays of one dtype, and add up in float32."""
    return jnp.einsum(spec, a, b, preferred_element_type=f32)


def _chunks(q, k, v, log_decay, begins, size: int) -> _Chunks:
    G = k.shape[2]
    d = decays(log_decay, begins, size)
    between, start, end, whole = (
        _by_group(a, G)
        for a in (d.between, d.since_start[..., None], d.until_end[..., None], d.of_chunk)
    )
    values = _by_group(in_chunks(v.astype(f32), size), G)
    q, k = in_chunks(q, size), in_chunks(k, size)
    return _Chunks(q, k, values, between, start, end, whole[..., None, None])


def _by_group(a: jax.Array, G: int) -> jax.Array:
    """Return [N, B, G, R, ...] of [N, B, H, ...]."""
    return a.reshape(*a.shape[:2], G, -1, *a.shape[3:])


def _grouped(state: jax.Array, G: int) -> jax.Array:
    return state.reshape(state.shape[0], G, -1, *state.shape[2:])
