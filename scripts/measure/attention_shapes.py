"""Attention shapes to measure: their masks, FLOPs and inputs, and a result's errors.

Errors are relative to float32 attention of the same values.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import ConfigError, ParallelConfig
from jaxpar.config.rules.limits import MAX_SEQUENCE
from jaxpar.kernels.attention import api, reference
from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.parallel.context import token_order

#: Documents in a packed row.
DOCUMENTS = 16
#: Documents start on a grid of this many positions, offset from the tiles of all kernels. They then
#: have few different lengths, each of which needs a compiled program.
GRID = 64
#: Sequence length divided by the window size.
WINDOW_PART = 8
#: Devices that shard a zigzag sequence; one device's shard is measured.
ZIGZAG = 4

#: (B, T, H, G, D) of each name in --shapes. T is the full sequence length.
NAMED: dict[str, list[tuple[int, int, int, int, int]]] = {
    "causal": [
        (4, 4096, 32, 8, 128),
        (2, 8192, 32, 8, 128),
        (1, 32768, 32, 8, 128),
        (8, 4096, 32, 8, 64),
        (4, 4096, 16, 16, 256),
    ],
    "packed": [(1, 32768, 32, 8, 128)],
    "window": [(1, 32768, 32, 8, 128)],
    "zigzag": [(1, 32768, 32, 8, 128)],
}


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """An attention problem: T queries and S keys, with H query and G KV heads of D dims."""

    name: str
    B: int
    T: int
    S: int
    H: int
    G: int
    D: int
    documents: tuple[int, ...] = ()
    window: int | None = None

    @property
    def kind(self) -> str:
        """The kind of mask in the table of measurements; zigzag is a general mask."""
        return "general" if self.name == "zigzag" else self.name

    @property
    def size(self) -> dict[str, int]:
        """Return the six sizes by letter."""
        return {letter: getattr(self, letter) for letter in "BTSHGD"}

    def __str__(self) -> str:
        keys = "" if self.T == self.S else f" S={self.S}"
        return f"{self.name} B={self.B} T={self.T}{keys} H={self.H} G={self.G} D={self.D}"

    def positions(self) -> np.ndarray:
        """Return the queries' positions in the text or document, int32 [T]."""
        if self.documents:
            return np.concatenate([np.arange(n) for n in self.documents]).astype(np.int32)
        order = self.key_order()
        return (np.arange(self.T) if order is None else order[self.T : 2 * self.T]).astype(np.int32)

    def key_order(self) -> np.ndarray | None:
        """Return the text position of each key of a zigzag sequence; None: in order."""
        if self.name != "zigzag":
            return None
        return token_order(ParallelConfig(sequence=ZIGZAG), self.S)

    def seen(self) -> int:
        """Return the number of (query, key) pairs that the mask allows in the batch.

        A query sees itself and all before it in its document, or as many as the window holds.
        """
        past = self.positions().astype(np.int64) + 1
        return self.B * int((past if self.window is None else np.minimum(past, self.window)).sum())

    def useful_flops(self, direction: str) -> float:
        """Return the FLOPs of the allowed pairs: two matmuls forward, five backward."""
        forward = 4.0 * self.H * self.D * self.seen()
        return forward * {"forward": 1.0, "backward": 2.5}[direction]

    def mask(self) -> AttentionMask:
        """Return the mask as a training step passes it."""
        rows = lambda x: jnp.asarray(np.tile(x.astype(np.int32), (self.B, 1)))  # noqa: E731
        places, order, segments = rows(self.positions()), self.key_order(), None
        if self.documents:
            segments = rows(np.repeat(np.arange(1, len(self.documents) + 1), self.documents))
        return AttentionMask(
            q_positions=places,
            kv_positions=places if order is None else rows(order),
            q_segments=segments,
            kv_segments=segments,
            window=self.window,
            max_segments=len(self.documents) or None,
            in_order=order is None,
        )


class Arrays(NamedTuple):
    """The arrays of a shape; a pytree whose mask keeps its static fields."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: AttentionMask
    d_out: jax.Array


def draw(shape: AttentionShape, dtype: str, seed: int = 0) -> Arrays:
    """Draw normal values from a seed."""
    keys = jax.random.split(jax.random.key(seed), 4)
    queries, others = (shape.B, shape.T, shape.H, shape.D), (shape.B, shape.S, shape.G, shape.D)
    normal = lambda key, size: jax.random.normal(key, size, dtype)  # noqa: E731
    q, k, v = normal(keys[0], queries), normal(keys[1], others), normal(keys[2], others)
    return Arrays(q, k, v, shape.mask(), normal(keys[3], queries))


def document_lengths(total: int) -> tuple[int, ...]:
    """Return the document lengths of a packed row, from a fixed seed."""
    number, grid = min(DOCUMENTS, total), max(total // GRID, 1)
    places = np.random.default_rng(0).choice(np.arange(1, total // grid), number - 1, replace=False)
    cuts = np.sort(places) * grid + grid // 7
    return tuple(int(n) for n in np.diff([0, *cuts, total]))


def make_shape(word: str, B: int, T: int, H: int, G: int, D: int) -> AttentionShape:
    """Return a shape of a kind in NAMED with any sizes.

    Raises:   ConfigError for invalid sizes.
    """
    said = f"{B},{T},{H},{G},{D}"
    if min(B, T, H, G, D) < 1 or H % G:
        fix = "use 1,4096,32,8,128"
        raise ConfigError(
            "--shapes", said, "must be positive B,T,H,G,D with H a multiple of G", fix
        )
    if word != "causal" and T % (2 * DOCUMENTS):
        rule = f"T of {word} must be a multiple of {2 * DOCUMENTS}"
        raise ConfigError("--shapes", said, rule, f"use T={max(T // 32, 1) * 32}")
    shape = AttentionShape(word, B, T, T, H, G, D)
    if word == "packed":
        return dataclasses.replace(shape, documents=document_lengths(T))
    if word == "window":
        return dataclasses.replace(shape, window=T // WINDOW_PART)
    return dataclasses.replace(shape, T=T // ZIGZAG) if word == "zigzag" else shape


def parse_shapes(items: Sequence[str]) -> list[AttentionShape]:
    """Parse `causal,window`, `1,4096,32,8,128` (causal) and `window:1,4096,32,8,128`.

    Raises:   ConfigError for an unknown name or invalid sizes.
    """
    shapes = []
    for item in items:
        sized = re.fullmatch(r"(?:(\w+):)?([0-9]+(?:,[0-9]+){4})", item)
        words = [sized.group(1) or "causal"] if sized else item.split(",")
        for word in words:
            if word not in NAMED:
                fix = f"use {', '.join(NAMED)}, B,T,H,G,D or KIND:B,T,H,G,D"
                raise ConfigError("--shapes", item, f"{word!r} is not a shape", fix)
            sizes = [tuple(map(int, sized.group(2).split(",")))] if sized else NAMED[word]
            if max(map(max, sizes)) > MAX_SEQUENCE:
                rule = f"must have sizes of at most {MAX_SEQUENCE:,}"
                raise ConfigError("--shapes", item, rule, "use smaller ones")
            shapes += [make_shape(word, *size) for size in sizes]
    return shapes


#: Output and log-sum-exp.
type Saved = tuple[jax.Array, jax.Array]


class BackendPrograms:
    """A backend's forward and backward, compiled.

    Args:     of_forward, of_backward: further arguments of the backend's functions.
    """

    def __init__(self, backend: str, of_forward: Any = None, of_backward: Any = None):
        module = api.BACKENDS[backend]
        run_forward = partial(module.forward, **of_forward or {})
        run_backward = partial(module.backward, **of_backward or {})

        def forward(r: Arrays) -> Saved:
            return run_forward(r.q, r.k, r.v, r.mask)

        def backward(r: Arrays, saved: Saved) -> tuple:
            out, lse = saved
            return run_backward(r.q, r.k, r.v, r.mask, out, lse, r.d_out, jnp.zeros_like(lse))

        self.forward, self.backward = jax.jit(forward), jax.jit(backward)

    def program(self, direction: str, asked: Arrays, saved: Saved) -> Callable[[], Any]:
        """Return a function without arguments that launches a direction."""
        if direction == "backward":
            return partial(self.backward, asked, saved)
        return partial(self.forward, asked)


# ------------------------------------------------------------------------------------- errors

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

    Scores of all heads would not fit; heads and rows are independent.
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
            part = dataclasses.replace(
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
