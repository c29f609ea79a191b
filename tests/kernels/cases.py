"""Attention requests of every kind, drawn at random, and how far an answer is from the reference.

For the tests of our own kernels, interpreted and compiled.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from jaxpar.kernels.attention import AttentionMask, reference
from jaxpar.kernels.attention.hopper import api as pallas_hopper
from jaxpar.kernels.attention.hopper.blocks import ForwardBlocks

NAMES = ("out", "lse", "dq", "dk", "dv")

#: Rounding to bfloat16 is off by 1.7e-3 in the mean square, to float16 by an eighth of that. The
#: weights, the gradients of scores, and the results are rounded once each: together 3.1e-3 at most.
BOUNDS = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
LSE_BOUND = 1e-5
"""Absolute; float32 in every backend."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A request by its shape.

    order       text: the text's own. permuted: T queries and S keys picked from one text, each in
                an order of its own. zigzag: all S keys of a text, gathered from shards in zigzag
                order, and the T queries of one. late: keys that begin after half of the queries.
    I           head dim of values; None: K.
    documents   in the first row, one fewer in each row after it; None: no segments.
    """

    order: str = "text"
    B: int = 1
    T: int = 256
    S: int | None = None
    H: int = 2
    G: int = 1
    K: int = 64
    I: int | None = None  # noqa: E741
    documents: int | None = None
    window: int | None = None
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """What differs from the defaults, for pytest."""
        fields = dataclasses.fields(self)
        given = {f.name: getattr(self, f.name) for f in fields}
        words = [f"{f.name}{given[f.name]}" for f in fields if given[f.name] != f.default]
        return "-".join(words) or self.order

    @property
    def keys(self) -> int:
        """S, which is T unless given."""
        return self.T if self.S is None else self.S


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of a request, and cotangents for what it gives."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: AttentionMask
    d_out: jax.Array
    d_lse: jax.Array

    def replace(self, **arrays) -> "Inputs":
        """With other arrays in these places."""
        return dataclasses.replace(self, **arrays)


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    """Standard normal values and a mask."""
    rng = np.random.default_rng(seed)
    mask = jax.tree.map(jnp.asarray, mask_of(case, rng))
    queries, keys = (case.B, case.T, case.H, case.K), (case.B, case.keys, case.G, case.K)
    values, outs = ((*shape[:3], case.I or case.K) for shape in (keys, queries))
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=shape), case.dtype) for shape in (queries, keys, values, outs)
    )
    d_lse = jnp.asarray(rng.normal(size=(case.B, case.H, case.T)), jnp.float32)
    return Inputs(q, k, v, mask, d_out, d_lse)


def mask_of(case: Case, rng) -> AttentionMask:
    """Of numpy arrays."""
    length = max(case.T, case.keys)
    if case.order == "permuted":
        length += length // 4  # so that some queries miss the few keys that they could see
    positions, segments = _text(case, rng, length)
    queries, keys = _places(case, rng, length)
    pick = lambda x, places: np.take_along_axis(x, places, axis=1)  # noqa: E731
    late = case.T // 2 if case.order == "late" else 0
    packed = case.documents is not None
    return AttentionMask(
        q_positions=pick(positions, queries),
        kv_positions=pick(positions, keys) + np.int32(late),
        q_segments=pick(segments, queries) if packed else None,
        kv_segments=pick(segments, keys) if packed else None,
        window=case.window,
        max_segments=case.documents,
        in_order=case.order == "text",
    )


def _text(case: Case, rng, length: int):
    """Positions inside documents, and documents counted from 1; int32 [B, length] each."""
    begins = np.zeros((case.B, length), bool)
    for row in range(case.B):
        cuts = min(max(0, (case.documents or 1) - 1 - row), length - 1)
        begins[row, 1 + rng.choice(length - 1, cuts, replace=False)] = cuts > 0
    place = np.broadcast_to(np.arange(length, dtype=np.int32), begins.shape)
    positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    return positions, 1 + np.cumsum(begins, axis=1, dtype=np.int32)


def _places(case: Case, rng, length: int):
    """Which tokens of the text are queries, and which are keys; [B, T] and [B, S]."""
    if case.order == "permuted":
        some = lambda n: np.stack([rng.permutation(length)[:n] for _ in range(case.B)])  # noqa: E731
        return some(case.T), some(case.keys)
    if case.order == "zigzag":
        chunks = np.arange(case.keys).reshape(2 * case.keys // case.T, -1)
        shards = np.stack([chunks, chunks[::-1]], axis=1)[: len(chunks) // 2]
        queries, keys = shards[len(shards) // 2].ravel(), shards.ravel()
    else:
        queries, keys = np.arange(case.T), np.arange(case.keys)
    return tuple(np.broadcast_to(x, (case.B, len(x))) for x in (queries, keys))


def reference_of(x: Inputs) -> list[jax.Array]:
    """NAMES, by the reference in float32, and with its own output and log-sum-exp."""
    with jax.default_matmul_precision("highest"):  # not TF32
        q, k, v, d_out = (y.astype(jnp.float32) for y in (x.q, x.k, x.v, x.d_out))
        out, lse = reference.forward(q, k, v, x.mask)
        return [out, lse, *reference.backward(q, k, v, x.mask, out, lse, d_out, x.d_lse)]


def largest_of(x: Inputs) -> np.ndarray:
    """The largest product of each query and a key that it sees, [B, H, T]; -1e30 without a key."""
    q, k = (np.asarray(y.astype(jnp.float32)) for y in (x.q, x.k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    products = np.einsum("bthk,bshk->bhts", q, k)
    return np.where(np.asarray(x.mask.dense())[:, None], products, -1e30).max(axis=-1)


def errors(found, wanted) -> dict[str, float]:
    """By name: relative in L2 norm; of the log-sum-exp, the largest difference."""
    pairs = [[np.asarray(y, np.float64) for y in pair] for pair in zip(found, wanted, strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    off = [np.linalg.norm(a - b) / (np.linalg.norm(b) or 1) for a, b in pairs]
    off[NAMES.index("lse")] = np.abs(np.subtract(*pairs[NAMES.index("lse")])).max()
    return dict(zip(NAMES, map(float, off), strict=True))


def check(found, wanted, dtype: str) -> None:
    """Errors within bounds, in the dtypes that `attention` promises."""
    dtypes = [str(y.dtype) for y in found]
    assert dtypes == ["float32" if name == "lse" else dtype for name in NAMES]
    off = errors(found, wanted)
    assert off.pop("lse") < LSE_BOUND
    assert max(off.values()) < BOUNDS[dtype], off


@contextlib.contextmanager
def interpreter():
    """Pallas' interpreter of GPU kernels; gives a function: which kernels so far had a race."""
    make, states = gpu_callbacks.GPURaceDetectionState, []

    def remember(**options):
        states.append(make(**options))
        return states[-1]

    interpreting = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))
    with interpreting, mock.patch.object(gpu_callbacks, "GPURaceDetectionState", remember):
        try:
            yield lambda: [state.races_found for state in states]
        finally:  # a kernel that failed leaves its memory behind
            gpu_callbacks.reset_gpu_interpret_mode_state()


def interpreted(
    x: Inputs, forward_blocks: ForwardBlocks | None = None, **options
) -> list[jax.Array]:
    """NAMES by the kernels, inside `interpreter`. options: of the backward.

    Not under an outer jit: the interpreter's callbacks may then wait for ever for XLA's threads.
    """
    out, lse = pallas_hopper.forward(x.q, x.k, x.v, x.mask, blocks=forward_blocks, interpret=True)
    rest = out, lse, x.d_out, x.d_lse
    grads = pallas_hopper.backward(x.q, x.k, x.v, x.mask, *rest, interpret=True, **options)
    return jax.block_until_ready([out, lse, *grads])
