"""The shapes that attention is measured on: their masks, and the work that is in them."""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import ConfigError, ParallelConfig
from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.parallel.context import token_order

#: Documents in a packed row.
DOCUMENTS = 16
#: A packed row is cut at places of a grid this fine, moved off the tiles of every kernel. The
#: documents then have few different lengths, each of which is a program to compile.
GRID = 64
#: A window is this part of its sequence.
WINDOW_PART = 8
#: Devices that a zigzag sequence is cut over; what is measured is the shard of one.
ZIGZAG = 4

#: (B, T, H, G, D) behind each word of --shapes. T is the whole sequence.
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
    """One request of attention: T queries against S keys, in H query and G KV heads of D dims."""

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
        """As in the table of measurements: zigzag is one of the general masks."""
        return "general" if self.name == "zigzag" else self.name

    @property
    def size(self) -> dict[str, int]:
        """The six sizes by letter."""
        return {letter: getattr(self, letter) for letter in "BTSHGD"}

    def __str__(self) -> str:
        keys = "" if self.T == self.S else f" S={self.S}"
        return f"{self.name} B={self.B} T={self.T}{keys} H={self.H} G={self.G} D={self.D}"

    def positions(self) -> np.ndarray:
        """Of the queries in the text or in their document, int32 [T]."""
        if self.documents:
            return np.concatenate([np.arange(n) for n in self.documents]).astype(np.int32)
        order = self.key_order()
        return (np.arange(self.T) if order is None else order[self.T : 2 * self.T]).astype(np.int32)

    def key_order(self) -> np.ndarray | None:
        """Where each key of a zigzag sequence stands in the text; None: in order."""
        if self.name != "zigzag":
            return None
        return token_order(ParallelConfig(sequence=ZIGZAG), self.S)

    def seen(self) -> int:
        """How many (query, key) pairs the mask leaves, in all rows of the batch.

        A query sees itself and all before it in its document, or as many as the window holds.
        """
        past = self.positions().astype(np.int64) + 1
        return self.B * int((past if self.window is None else np.minimum(past, self.window)).sum())

    def useful_flops(self, direction: str) -> float:
        """FLOPs over the pairs that are seen: two matmuls forward, five backward."""
        forward = 4.0 * self.H * self.D * self.seen()
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]

    def mask(self) -> AttentionMask:
        """The mask, as a training step would pass it."""
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

    def yardstick(self) -> tuple[str, list["AttentionShape"]]:
        """Causal requests at whose rate the mask's work would ideally run; none for the others."""
        plain = dataclasses.replace(self, name="causal", documents=(), window=None)
        if self.documents:
            alone = [dataclasses.replace(plain, T=n, S=n) for n in self.documents]
            return "documents run alone", alone
        return ("causal of the same length", [plain]) if self.window else ("", [])


class Arrays(NamedTuple):
    """The arrays of a shape; a pytree whose mask keeps its static fields."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: AttentionMask
    d_out: jax.Array


def draw(shape: AttentionShape, dtype: str, seed: int = 0) -> Arrays:
    """Normal values from a seed."""
    keys = jax.random.split(jax.random.key(seed), 4)
    queries, others = (shape.B, shape.T, shape.H, shape.D), (shape.B, shape.S, shape.G, shape.D)
    normal = lambda key, size: jax.random.normal(key, size, dtype)  # noqa: E731
    q, k, v = normal(keys[0], queries), normal(keys[1], others), normal(keys[2], others)
    return Arrays(q, k, v, shape.mask(), normal(keys[3], queries))


def document_lengths(total: int) -> tuple[int, ...]:
    """Lengths of the documents of a packed row, from a fixed seed."""
    number, grid = min(DOCUMENTS, total), max(total // GRID, 1)
    places = np.random.default_rng(0).choice(np.arange(1, total // grid), number - 1, replace=False)
    cuts = np.sort(places) * grid + grid // 7
    return tuple(int(n) for n in np.diff([0, *cuts, total]))


def make_shape(word: str, B: int, T: int, H: int, G: int, D: int) -> AttentionShape:
    """The shape of a word of NAMED, of any size.

    Raises:   ConfigError for sizes that do not fit.
    """
    said = f"{B},{T},{H},{G},{D}"
    if min(B, T, H, G, D) < 1 or H % G:
        fix = "use 1,4096,32,8,128"
        raise ConfigError("--shapes", said, "must be B,T,H,G,D above 0, H a multiple of G", fix)
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
    """The shapes of `causal,window`, `1,4096,32,8,128` (causal) and `window:1,4096,32,8,128`.

    Raises:   ConfigError for a word that is not known and sizes that do not fit.
    """
    shapes = []
    for item in items:
        sized = re.fullmatch(r"(?:(\w+):)?(\d+(?:,\d+){4})", item)
        words = [sized.group(1) or "causal"] if sized else item.split(",")
        for word in words:
            if word not in NAMED:
                fix = f"use {', '.join(NAMED)}, B,T,H,G,D or KIND:B,T,H,G,D"
                raise ConfigError("--shapes", item, f"{word!r} is no shape", fix)
            sizes = [tuple(map(int, sized.group(2).split(",")))] if sized else NAMED[word]
            shapes += [make_shape(word, *size) for size in sizes]
    return shapes
