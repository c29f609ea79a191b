"""How components of users compute: theirs see plain arrays, and this file the mesh.

    compute(x, w, tokens)    a `Mixer`: whole sequences [B, S, D] -> [B, S, D]
    compute(x, w)            a `FeedForward`: some of the tokens [B, T, D] -> [B, T, D]
    heads(q, k, v, mask)     an `Attention`: this rank's heads, all keys -> [B, T, H, K]

x is the norm of the residual stream, and w a dict of this tensor rank's weights, complete over the
FSDP axes, with the dims that the component declares; if it `uses_products`, as matrices with their
adapters, for `linear`. A component that splits dims over TENSOR
("heads", "kv_heads", "mlp") returns this rank's part of a sum over all ranks; of one that splits
none, the first rank's result is taken. While text is generated, a mixer takes a step for each token
if it has a state. Otherwise it computes all tokens of the text again: it holds its inputs.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.components.attention import Attention
from jaxpar.components.component import FeedForward, Mixer, Term, Tokens
from jaxpar.components.weight import Weight
from jaxpar.config import Config
from jaxpar.execution.decisions import Execution
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.attention_context import AttentionContext, component
from jaxpar.model.held import HeldSize, NewTokens, write
from jaxpar.parallel.collectives import all_gather, share, varying_axes
from jaxpar.parallel.tensor.shards import Shards
from jaxpar.sharding.axes import RULES, SEQUENCE, TENSOR

type Weights = dict[str, Any]


def feed_forward(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Apply a user's feed-forward to each shard of the sequence."""
    own = component(context, FeedForward)
    declared = own.weights(ex.cfg.model)

    def of_shard(h: NormOutput, w: Weights) -> jax.Array:
        x = h.whole()
        y = _checked(own, "compute", own.compute(x, _given(own, w, declared), None), x)
        return _partial(y, declared)

    return h.map(of_shard, w)


def mixer(h: Shards, w: Weights, context: AttentionContext, ex: Execution) -> Shards:
    """Apply a user's mixer to whole sequences; each device keeps its tokens.

    Communication: gathers of the norm, positions and documents over SEQUENCE, and their transpose.
    """
    own = component(context, Mixer)
    assert context.positions is not None and context.segments is not None
    x = all_gather(h.each(NormOutput.whole).in_order(), SEQUENCE, 1)
    where = (all_gather(a, SEQUENCE, 1) for a in (context.positions, context.segments))
    declared = own.weights(ex.cfg.model)
    y = _computed(own, x, _given(own, w, declared), Tokens(*where))
    return h.split(share(_partial(y, declared), SEQUENCE, 1))


def _computed(own: Mixer, x: jax.Array, w: Weights, tokens: Tokens) -> jax.Array:
    if own.has_state and type(own).compute is Term.compute:
        return token_by_token(own, x, w, tokens.positions)
    return _checked(own, "compute", own.compute(x, w, tokens), x)


def _checked[T](own: Term, method: str, found: T, wanted: Any) -> T:
    """Return what a method returned. Raises:   TypeError for other shapes or dtypes."""
    form = lambda tree: jax.tree.map(lambda a: f"{a.dtype} {a.shape}", tree)  # noqa: E731
    if form(found) != form(wanted):
        name = f"{type(own).__name__}.{method}"
        raise TypeError(f"{name} returns {form(found)}, not {form(wanted)}")
    return found


def token_by_token(own: Mixer, x: jax.Array, w: Weights, positions: jax.Array) -> jax.Array:
    """Compute a mixer by its `step`, [B, S, D] -> [B, S, D]. Documents begin at position 0."""
    start = own.init_state(len(x), w)
    if x.dtype == jnp.float64:  # `certify` looks at what rounding does
        exact = lambda a: a.astype(x.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a  # noqa: E731
        start = jax.tree.map(exact, start)

    def one(state: Any, token: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        x, at = token
        y, after = _step(own, x, w, _of_rows(at == 0, start, state), at)
        return after, y

    return _over_tokens(one, start, x, positions)[1]


def _over_tokens(
    one: Callable[[Any, Any], tuple[Any, jax.Array]], start: Any, x: jax.Array, positions: jax.Array
) -> tuple[Any, jax.Array]:
    """Scan tokens: (state, (x [B, D], positions [B])) -> (state, y)."""
    # The types of arrays in a step have the mesh axes over which they vary; those of zeros do not.
    missing = lambda a: tuple(n for n in varying_axes(x) if n not in varying_axes(a))  # noqa: E731
    cast = lambda a: lax.pcast(a, missing(a), to="varying") if missing(a) else a  # noqa: E731
    swapped = lambda a: jnp.moveaxis(a, 1, 0)  # noqa: E731
    state, y = lax.scan(one, jax.tree.map(cast, start), (swapped(x), swapped(positions)))
    return state, swapped(y)


def _of_rows(which: jax.Array, found: Any, others: Any) -> Any:
    """Return the state `found` of some rows, and that of the others. Args: which: bool [B]."""
    shaped = lambda a: which.reshape(-1, *[1] * (a.ndim - 1))  # noqa: E731
    return jax.tree.map(lambda a, b: jnp.where(shaped(a), a, b), found, others)


def _step(
    own: Mixer, x: jax.Array, w: Weights, state: Any, positions: jax.Array
) -> tuple[jax.Array, Any]:
    """Take a step. Raises:   TypeError if it changes the form of the state, or of x."""
    return _checked(own, "step", own.step(x, w, state, positions), (x, state))


def _given(own: Term, w: Weights, declared: Mapping[str, Weight]) -> Weights:
    """Return a tensor rank's weights: with the dims that the component declares, or as matrices."""
    if own.uses_products:
        return w
    tensor = lax.axis_size(TENSOR)
    return {n: w[n].reshape(_shape(one, tensor)) for n, one in declared.items() if n in w}


def _shape(weight: Weight, tensor: int) -> tuple[int, ...]:
    """Return the dims of a tensor rank's part of a weight."""
    pairs = zip(weight.shape, weight.axes, strict=True)
    return tuple(n // tensor if TENSOR in RULES[axis] else n for n, axis in pairs)


def _partial(y: jax.Array, declared: Any) -> jax.Array:
    """Return a part of the sum over TENSOR: y, or of ranks that compute the same, the first's."""
    splits = any(TENSOR in RULES[axis] for w in declared.values() for axis in w.axes)
    if splits or lax.axis_size(TENSOR) == 1:
        return y
    return jnp.where(lax.axis_index(TENSOR) == 0, y, jnp.zeros_like(y))


def computes_itself(term: Term) -> bool:
    """Return whether a user's component has no plain form beside what it computes."""
    if term.has_plain:
        return False
    if isinstance(term, Mixer) and term.has_state:
        return type(term).compute is Term.compute
    own = isinstance(term, Attention) and term.own_methods
    return bool(own) or not term.uses_products


# --------------------------------------------------------------------------------- generation


def decoding(own: Mixer) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """Return `decode`, `held` and `held_specs` of a user's mixer (`layer.Computation`)."""
    if own.has_state:
        return _decode_by_steps, _held_state, STATES
    return _decode_again, _held_inputs, INPUTS


#: How states are split over a mesh: each tensor rank has its own, [B, 1, ...].
STATES = PartitionSpec(None, TENSOR)


def _held_state(own: Mixer, size: HeldSize) -> Any:
    """Return zeros with the shapes of a state."""
    declared = own.weights(size.model)
    w = {n: jnp.zeros(_shape(one, size.tensor), size.dtype) for n, one in declared.items()}
    state = jax.eval_shape(lambda w: own.init_state(size.rows, w), w)
    return jax.tree.map(lambda a: jnp.zeros((size.rows, 1, *a.shape[1:]), a.dtype), state)


def _decode_by_steps(
    h: NormOutput, w: Weights, context: AttentionContext, held: Any, new: NewTokens, cfg: Config
) -> tuple[jax.Array, Any]:
    """Take new tokens one at a time. A prompt's state is that after its last token."""
    own, x = component(context, Mixer), h.whole()
    declared = own.weights(cfg.model)
    w, lengths = _given(own, w, declared), new.lengths

    def one(state: Any, token: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        y, after = _step(own, token[0], w, state, token[1])
        return (after if lengths is None else _of_rows(token[1] < lengths, after, state)), y

    if lengths is not None:
        state, y = _over_tokens(one, own.init_state(len(x), w), x, new.positions)
    else:
        assert x.shape[1] == 1, "a text with a state does not go back"
        state, y = one(jax.tree.map(lambda a: a[:, 0], held), (x[:, 0], new.positions[:, 0]))
        y = y[:, None]
    return _partial(y, declared), jax.tree.map(lambda a: a[:, None], state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Inputs:
    """What a mixer without a state holds of each row's text."""

    x: Any
    """[B, S, D]: its inputs."""


#: How they are split over a mesh: complete on each tensor rank.
INPUTS = Inputs(PartitionSpec())


def _held_inputs(_: Mixer, size: HeldSize) -> Inputs:
    """Return zeros for the inputs of a text."""
    return Inputs(jnp.zeros((size.rows, size.slots, size.model.d_model), size.dtype))


def _decode_again(
    h: NormOutput, w: Weights, context: AttentionContext, held: Inputs, new: NewTokens, cfg: Config
) -> tuple[jax.Array, Inputs]:
    """Compute all tokens of each row again, and return those that are new.

    Later slots are of no text yet; a causal mixer does not read them.
    """
    own, x = component(context, Mixer), h.whole()
    text = write(held.x, x, new.first)
    slots = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32), text.shape[:2])
    declared = own.weights(cfg.model)
    tokens = Tokens(slots, jnp.ones_like(slots))
    y = _computed(own, text, _given(own, w, declared), tokens)
    y = jnp.take_along_axis(_partial(y, declared), new.positions[..., None], axis=1)
    return y, Inputs(text)
