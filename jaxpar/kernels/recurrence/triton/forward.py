"""The forward of a recurrence: the states between chunks, then the outputs.

`states` is sequential over the chunks. A program has a block of the columns of V of one head, with
its state in registers. `outputs` computes all chunks at once.
"""

import functools
from types import SimpleNamespace as Refs

import jax

from jaxpar.kernels.attention.triton.compiler import div, f32, launch, loop, mod, program, rows
from jaxpar.kernels.recurrence.triton.shape import (
    ChunkDecays,
    RecurrenceShape,
    product,
    scaled,
)

#: Warps of a program, and stages of the pipeline of loads.
STATES_WARPS, STATES_STAGES = 4, 4
OUTPUTS_WARPS = 4


def states(s: RecurrenceShape, k, v, sums, rate, inverse, state):
    """Return the states before each chunk, what tokens write, and the last state.

    Args:     state: float32 [B, H, K, V]. rate, inverse: None for a state space.
    Returns:  ([B, H, N, K, V], [B, T, H, V] in q's dtype; v itself for a state space; float32 [B,
              H, K, V]).
    """
    before = (s.B, s.H, s.N, s.K, s.V), s.dtype
    written = [(v.shape, s.dtype)] if s.delta else []
    found = launch(
        functools.partial(_states_kernel, s),
        [k, v, *sums, *([rate, inverse] if s.delta else []), state],
        [before, *written, (state.shape, f32)],
        programs=s.B * s.H * s.blocks,
        warps=STATES_WARPS,
        stages=STATES_STAGES,
        name="recurrence_states",
        interpret=s.interpret,
    )
    return found if s.delta else (found[0], v, found[1])


def _states_kernel(s: RecurrenceShape, *refs):
    names = "k v coarse fine document rate inverse state states written last"
    if not s.delta:
        names = "k v coarse fine document state states last"
    r = Refs(**dict(zip(names.split(), refs, strict=True)))
    columns, lane = s.columns(mod(program(), s.blocks)), div(program(), s.blocks)
    b, h = div(lane, s.H), mod(lane, s.H)
    g, whole = div(h, s.group), rows(0, s.C)

    def one(n, state):
        here, at = rows(n * s.C, s.C), ChunkDecays(s, r, b, n, h)
        k, written = r.k[b, here, g, s.all_keys], r.v[b, here, h, columns].astype(f32)
        r.states[b, h, n, s.all_keys, columns] = state.astype(s.dtype)
        if s.delta:
            known = scaled(at.since_start, product(s, k, state))
            less = scaled(r.rate[b, h, here], written - known)
            written = product(s, r.inverse[b, h, n, whole, whole], less)
            r.written[b, here, h, columns] = written.astype(s.dtype)
        return at.of_chunk * state + product(s, k.T, scaled(at.until_end, written))

    first = r.state[b, h, s.all_keys, columns]
    r.last[b, h, s.all_keys, columns] = loop(0, s.N, one, first)


# Inside a jit of its own: a rematerialized backward would run a bare pallas_call again, though
# nothing reads its result.
@functools.partial(jax.jit, static_argnums=0)
def outputs(s: RecurrenceShape, q, sums, scores, before, written):
    """Return [B, T, H, V] in q's dtype. Args: before: the states before each chunk."""
    (out,) = launch(
        functools.partial(_outputs_kernel, s),
        [q, *sums, scores, before, written],
        [(written.shape, s.dtype)],
        programs=s.B * s.N * s.H * s.blocks,
        warps=OUTPUTS_WARPS,
        stages=1,
        name="recurrence_outputs",
        interpret=s.interpret,
    )
    return out


def _outputs_kernel(s: RecurrenceShape, *refs):
    names = "q coarse fine document scores states written out"
    r = Refs(**dict(zip(names.split(), refs, strict=True)))
    columns, at = s.columns(mod(program(), s.blocks)), div(program(), s.blocks)
    h, at = mod(at, s.H), div(at, s.H)
    b, n, g = div(at, s.N), mod(at, s.N), div(h, s.group)
    here, whole = rows(n * s.C, s.C), rows(0, s.C)
    earlier = product(s, r.q[b, here, g, s.all_keys], r.states[b, h, n, s.all_keys, columns])
    own = product(s, r.scores[b, h, n, whole, whole], r.written[b, here, h, columns])
    since_start = ChunkDecays(s, r, b, n, h).since_start
    r.out[b, here, h, columns] = (scaled(since_start, earlier) + own).astype(s.dtype)
