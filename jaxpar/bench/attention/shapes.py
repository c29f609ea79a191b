"""The shapes of the attention benchmark: their masks and FLOPs."""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import ConfigError, ParallelConfig
from jaxpar.config.rules.limits import MAX_SEQUENCE
from jaxpar.kernels.attention.mask import AttentionMask
from jaxpar.parallel.context import token_order

#: Documents in a packed row.
DOCUMENTS = 16
#: Documents start on a grid of this many positions, offset from the tiles of all kernels. They then
#: have few different lengths, each of which needs a compiled program.
GRID = 64
#: Sequence length divided by the window size.
WINDOW_PART = 8
#: Devices that shard a zigzag sequence; the benchmark runs one device's shard.
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
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]

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

    def yardstick(self) -> tuple[str, list["AttentionShape"]]:
        """Return causal problems whose rate is the ideal for this mask; empty for causal masks."""
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
