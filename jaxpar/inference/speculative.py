"""Speculative decoding: multi-token prediction drafts tokens, and the model verifies them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.config import Config
from jaxpar.inference.generation import (
    CHUNK,
    chances,
    check_positions,
    draw,
    padded,
    row_keys,
    seeing_as_in_training,
    slots_for,
    tokens_to_reread,
    until_stop,
)
from jaxpar.inference.options import Sampling
from jaxpar.model import decode
from jaxpar.model.mtp import module as modules
from jaxpar.sharding.axes import TENSOR

# ---------- The rule by which drafts are accepted: what it returns is distributed as without drafts
#
# A draft d, sampled from q, is accepted with probability min(1, p(d) / q(d)), where p are the
# model's chances. After the first that is rejected, the token comes from max(p - q, 0), normalized;
# after all have been accepted, from p. If both always take the most likely token, a draft is
# accepted if it is the model's.
#
# Source:   Leviathan et al. 2023 (2211.17192), algorithm 1.


def num_accepted(
    target: jax.Array, proposed: jax.Array, drafts: jax.Array, uniform: jax.Array
) -> jax.Array:
    """Return how many drafts of each row are accepted, int32 [B].

    Args:     target: the model's chances, float32 [B, N + 1, V], and those after all drafts.
              proposed: the chances from which drafts are sampled, float32 [B, N, V]. drafts: int32
              [B, N]. uniform: random numbers in [0, 1), float32 [B, N].
    """
    of_drafts = lambda a: jnp.take_along_axis(a, drafts[..., None], axis=-1)[..., 0]  # noqa: E731
    accepted = uniform * of_drafts(proposed) < of_drafts(target[:, :-1])
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)


def next_chances(target: jax.Array, proposed: jax.Array, accepted: jax.Array) -> jax.Array:
    """Return the chances of the token after the accepted drafts, float32 [B, V], not normalized.

    Args:     target, proposed: as in `num_accepted`. accepted: its result.
    """
    beyond = jnp.pad(proposed, ((0, 0), (0, 1), (0, 0)))  # nothing is proposed after all drafts
    p, q = (jnp.take_along_axis(a, accepted[:, None, None], axis=1)[:, 0] for a in (target, beyond))
    rest = jnp.maximum(p - q, 0.0)
    # By rounding alone, all of p can be below q; a draft was then rejected with no chance to be.
    return jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p)


# ---------- The compiled parts of speculative decoding: rounds of drafting, verifying and accepting
#
# A row's latest token is at position p, not yet read by the model. A round drafts the D tokens
# after it, runs the model on all D + 1, and accepts some of the drafts and one more token. The
# cache then has entries of rejected drafts: they are in the future of the new latest token, and the
# next round overwrites them.
#
# Modules run on the latest W = 2 D positions before p in every round: up to D + 1 of these are new,
# and D - 1 more were computed with drafts in place of tokens.
#
# With LongRoPE, all tokens of a round have the angles of a text that ends with the latest token. A
# row whose latest token is the last before others apply, or drafts beyond it, ends its round there.
# The next round first reads its text again, as `generation.generate` does.


#: Numbers that make the random keys of a position's draft, its acceptance and its token differ.
DRAFT, ACCEPTANCE, TOKEN = 1, 2, 3


@flax.struct.dataclass
class SpeculativeRows:
    """The state of a batch of texts during speculative decoding."""

    cache: decode.Cache
    modules: decode.Cache
    """A layer for each module."""
    hidden: jax.Array
    """[B, W, D]: the model's hidden states at positions max(p - W, 0) and following."""
    text: jax.Array
    """int32 [B, S + W]: the tokens of each row up to p, then anything."""
    position: jax.Array
    """int32 [B]: p."""
    drafted: jax.Array
    """int32 [B]: drafts so far."""
    accepted: jax.Array
    """int32 [B]: those that were accepted."""


@dataclass(frozen=True)
class SpeculativePrograms:
    """The compiled parts of `generate`, for one shape of batch."""

    start: Callable[[Any, np.ndarray, np.ndarray], SpeculativeRows]
    """(weights, tokens [B, T], lengths [B]) -> rows with their first token."""
    go_on: Any
    """Jitted (weights, rows, last [B]) -> rows after some rounds. A row ends at position `last`."""


@functools.lru_cache(maxsize=8)
def make_programs(
    cfg: Config, mesh: Mesh, how: Sampling, *, slots: int, vocab_size: int
) -> SpeculativePrograms:
    """Make the `SpeculativePrograms` for a cache of `slots` positions."""
    cfg = seeing_as_in_training(cfg)
    plain = PartitionSpec()
    cache = decode.cache_specs(cfg.model.layers, slots)
    of_modules = decode.cache_specs(modules.layers_of(cfg.model), slots)
    rows = SpeculativeRows(cache, of_modules, plain, plain, plain, plain, plain)  # type: ignore[arg-type]
    weights = PartitionSpec(TENSOR)
    own = lambda tree: jax.tree.map(lambda a: a[0], tree)  # noqa: E731
    rounds = max(CHUNK // (cfg.model.mtp_depth + 1), 1)

    def start(weights, tokens, lengths):
        return _started(own(weights), tokens, lengths, cfg, how, slots, vocab_size)

    def go_on(weights, rows, last):
        weights = own(weights)
        one = lambda rows, _: (_round(weights, rows, last, cfg, how, vocab_size), None)  # noqa: E731
        return lax.scan(one, rows, length=rounds)[0]

    apart = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    return SpeculativePrograms(
        jax.jit(apart(start, in_specs=(weights, plain, plain), out_specs=rows)),
        jax.jit(apart(go_on, in_specs=(weights, rows, plain), out_specs=rows), donate_argnums=1),
    )


def _started(
    weights, tokens, lengths, cfg: Config, how, slots: int, vocab_size: int
) -> SpeculativeRows:
    """Read the prompts with the model and its modules."""
    B, T = tokens.shape
    m = cfg.model
    cache = decode.empty_cache(cfg, B, slots)
    h, cache = decode.prompt(weights, tokens, lengths, cache, cfg)
    last = jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0]
    first = draw(decode.logits(weights, last, m), row_keys(how, lengths), how, vocab_size)
    text = jnp.zeros((B, slots + _window(cfg)), jnp.int32).at[:, :T].set(tokens)
    text = _put(text, first, lengths)
    held = decode.empty_cache(cfg, B, slots, layers=modules.layers_of(m))
    held, zeros = _read_by_modules(weights, h, text, lengths, held, cfg), lengths * 0
    hidden = _slices(h, _first_of_window(lengths, cfg), _window(cfg))
    return SpeculativeRows(cache, held, hidden, text, lengths, zeros, zeros)


def _read_by_modules(
    weights, h: jax.Array, text, lengths, held: decode.Cache, cfg: Config
) -> decode.Cache:
    """Return the cache of the modules after complete texts, from the model's hidden states."""
    x, first = h, lengths * 0
    for k in range(cfg.model.mtp_depth):
        after = text[:, k + 1 : k + 1 + h.shape[1]]
        x, held = modules.step(weights, k, x, after, first, held, cfg, lengths)
    return held


def _with_angles(weights, rows: SpeculativeRows, last, cfg: Config) -> SpeculativeRows:
    """Read the rows again whose latest token changes LongRoPE's angles of all their tokens."""
    most, size = decode.last_of_short_angles(cfg.model), tokens_to_reread(cfg, rows.cache.slots)
    if most is None or not size:
        return rows
    changed = (rows.position == most) & (rows.position < last)

    def again() -> SpeculativeRows:
        lengths = jnp.full_like(rows.position, most + 1)
        h, cache = decode.prompt(weights, rows.text[:, :size], lengths, rows.cache, cfg)
        held = _read_by_modules(weights, h, rows.text, lengths, rows.modules, cfg)
        hidden = _slices(h, _first_of_window(rows.position, cfg), _window(cfg))
        fresh = dataclasses.replace(rows, cache=cache, modules=held, hidden=hidden)
        of_rows = lambda a, b: jnp.where(  # noqa: E731
            jnp.expand_dims(changed, tuple(range(1, a.ndim))), a, b
        )
        return jax.tree.map(of_rows, fresh, rows)

    return lax.cond(jnp.any(changed), again, lambda: rows)


def _end_of_round(position, last, cfg: Config) -> jax.Array:
    """Return the last position that a round may reach: none whose angles are others."""
    most = decode.last_of_short_angles(cfg.model)
    return last if most is None else jnp.where(position < most, jnp.minimum(last, most), last)


def _length_of_angles(position: jax.Array, cfg: Config) -> jax.Array | None:
    """Return the length of the texts that decide a round's angles; None without LongRoPE."""
    return None if decode.last_of_short_angles(cfg.model) is None else position + 1


def _round(
    weights, rows: SpeculativeRows, last, cfg: Config, how: Sampling, vocab_size: int
) -> SpeculativeRows:
    """Draft, verify and accept tokens in each row that has not reached position `last`."""
    rows = _with_angles(weights, rows, last, cfg)
    depth, p = cfg.model.mtp_depth, rows.position
    text, proposed, held = _drafted(weights, rows, cfg, how, vocab_size)
    tokens = _slices(text, p, depth + 1)
    h, cache = decode.step(weights, tokens, p, rows.cache, cfg, _length_of_angles(p, cfg))
    logits = decode.logits(weights, h.reshape(-1, h.shape[-1]), cfg.model)
    target = chances(logits, how, vocab_size).reshape(*tokens.shape, vocab_size)
    uniform = jnp.stack(
        [jax.vmap(jax.random.uniform)(_keys(how, p + k + 1, ACCEPTANCE)) for k in range(depth)], 1
    )
    accepted = num_accepted(target, proposed, tokens[:, 1:], uniform)
    place = p + accepted + 1
    token = _sampled(next_chances(target, proposed, accepted), _keys(how, place, TOKEN))
    position = p + jnp.clip(_end_of_round(p, last, cfg) - p, 0, accepted + 1)
    goes_on = (p < last).astype(jnp.int32)
    old, new = _first_of_window(p, cfg), _first_of_window(position, cfg)
    hidden = jnp.pad(rows.hidden, ((0, 0), (0, depth + 1), (0, 0)))
    hidden = jax.vmap(lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, 0))(
        hidden, h, p - old
    )
    return SpeculativeRows(
        cache,
        held,
        _slices(hidden, new - old, _window(cfg)),
        _put(text, token, place),
        position,
        rows.drafted + depth * goes_on,
        rows.accepted + accepted * goes_on,
    )


def _drafted(weights, rows: SpeculativeRows, cfg: Config, how: Sampling, vocab_size: int):
    """Draft the tokens after each row's latest.

    Returns:  (the text with the drafts; their chances, [B, D, V]; the cache of the modules).
    """
    x, text, p, held = rows.hidden, rows.text, rows.position, rows.modules
    first, proposed = _first_of_window(p, cfg), []
    length = _length_of_angles(p, cfg)
    for k in range(cfg.model.mtp_depth):
        tokens = _slices(text, first + k + 1, _window(cfg))
        x, held = modules.step(weights, k, x, tokens, first, held, cfg, None, length)
        h = jnp.take_along_axis(x, (p - 1 - first)[:, None, None], axis=1)[:, 0]
        q = chances(decode.logits(weights, h, cfg.model), how, vocab_size)
        text = _put(text, _sampled(q, _keys(how, p + k + 1, DRAFT)), p + k + 1)
        proposed.append(q)
    return text, jnp.stack(proposed, 1), held


def _window(cfg: Config) -> int:
    """Return W."""
    return 2 * cfg.model.mtp_depth


def _first_of_window(position: jax.Array, cfg: Config) -> jax.Array:
    return jnp.maximum(position - _window(cfg), 0)


def _keys(how: Sampling, position: jax.Array, purpose: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, purpose))(row_keys(how, position))


def _sampled(chances: jax.Array, keys: jax.Array) -> jax.Array:
    """Sample a token of each row from chances [B, V], which need not be normalized."""
    return jax.vmap(jax.random.categorical)(keys, jnp.log(chances)).astype(jnp.int32)


def _slices(rows: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Return [B, size, ...]: `size` entries of each row, from its `first`."""
    one = lambda row, at: lax.dynamic_slice_in_dim(row, at, size)  # noqa: E731
    return jax.vmap(one)(rows, first)


def _put(text: jax.Array, token: jax.Array, place: jax.Array) -> jax.Array:
    return text.at[jnp.arange(len(text)), place].set(token)


# ------ Text generation with drafts: as `inference/generation.py`, with several tokens in each pass


@dataclass
class Drafts:
    """How many drafts the model has accepted, for one call of `generate`."""

    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """The share that was accepted."""
        return self.accepted / max(self.drafted, 1)


def generate(
    weights: Any,
    cfg: Config,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    *,
    max_tokens: int,
    vocab_size: int,
    stop: Set[int],
    drafts: Drafts | None = None,
) -> Iterator[list[list[int]]]:
    """Generate token ids after each prompt, as `inference.generation.generate`.

    Greedy text is the same. With a temperature, texts are drawn from the same distribution, but
    with other random numbers. SpeculativeRows may get unequal numbers of tokens at a time.

    Args:     cfg: with `model.mtp_depth`. weights: from `weights_for_sampling` with modules.
              drafts: counts what is drafted and accepted.
    """
    tokens, lengths = padded(prompts)
    longest = int(lengths.max())
    check_positions(cfg, longest, max_tokens)
    slots = slots_for(longest, max_tokens)
    programs = make_programs(cfg, mesh, how, slots=slots, vocab_size=vocab_size)
    rows = programs.start(weights, tokens, lengths)
    end = lengths + max_tokens - 1  # the position of a row's last token
    go_on = programs.go_on.lower(weights, rows, end).compile()
    jax.block_until_ready(rows)
    yield [[] for _ in prompts]
    shown, open_rows = lengths, np.ones(len(prompts), bool)
    while True:
        new, shown = _between(rows, shown), np.asarray(rows.position) + 1
        if drafts is not None:
            drafts.drafted = int(np.asarray(rows.drafted).sum())
            drafts.accepted = int(np.asarray(rows.accepted).sum())
        yield [
            until_stop(ids, stop) if going else []
            for ids, going in zip(new, open_rows, strict=True)
        ]
        stopped = np.array([bool(np.isin(ids, sorted(stop)).any()) for ids in new])
        open_rows &= ~stopped & (shown <= end)
        if not open_rows.any():
            return
        rows = go_on(weights, rows, np.where(open_rows, end, 0).astype(np.int32))


def _between(rows: SpeculativeRows, shown: np.ndarray) -> list[np.ndarray]:
    """Return each row's tokens that have not been shown, up to its latest."""
    text, position = np.asarray(rows.text), np.asarray(rows.position)
    return [row[first : last + 1] for row, first, last in zip(text, shown, position, strict=True)]
