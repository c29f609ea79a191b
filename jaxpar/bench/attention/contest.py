"""Compares the attention backends on one shape: times, rates, errors."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.bench.attention import exactness
from jaxpar.bench.attention.shapes import Arrays, AttentionShape, draw
from jaxpar.bench.timing import Timing, time_interleaved
from jaxpar.kernels.attention import api
from jaxpar.kernels.attention.dispatch import capability
from jaxpar.kernels.platform import Platform
from jaxpar.runtime.stages import stage

BACKENDS = tuple(capability.CAPABILITIES)
#: The backend with which the others are compared.
RIVAL = "cudnn"
DIRECTIONS = ("forward", "backward", "both")

type Row = dict[str, Any]
type Saved = list[tuple[jax.Array, jax.Array]]


class BackendPrograms:
    """A backend as three programs over lists of requests, which run sequentially.

    Args:     of_forward, of_backward: further arguments of the backend's functions.
    """

    def __init__(self, backend: str, of_forward: Row | None = None, of_backward: Row | None = None):
        module = api.BACKENDS[backend]
        run_forward = partial(module.forward, **of_forward or {})
        run_backward = partial(module.backward, **of_backward or {})

        def forward(requests: list[Arrays]) -> Saved:
            return [run_forward(r.q, r.k, r.v, r.mask) for r in requests]

        def backward(requests: list[Arrays], saved: Saved) -> list[tuple]:
            return [
                run_backward(r.q, r.k, r.v, r.mask, out, lse, r.d_out, jnp.zeros_like(lse))
                for r, (out, lse) in zip(requests, saved, strict=True)
            ]

        def both(requests: list[Arrays]) -> tuple[Saved, list[tuple]]:
            saved = forward(requests)
            return saved, backward(requests, saved)

        self.forward, self.backward = jax.jit(forward), jax.jit(backward)
        self.both = jax.jit(both)

    def program(self, direction: str, requests: list[Arrays], saved: Saved | None) -> Callable:
        """Return a function without arguments that launches a direction."""
        if direction == "backward":
            return partial(self.backward, requests, saved)
        return partial(getattr(self, direction), requests)


@dataclasses.dataclass
class Contender:
    """A backend on one shape: its errors, or why it did not run."""

    backend: str
    kernel: BackendPrograms | None = None
    refused: str = ""
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    saved: Saved | None = None
    saved_yard: Saved | None = None
    yard_failed: str = ""
    errors: dict[str, float] = dataclasses.field(default_factory=dict)

    def takes_part(self, direction: str) -> bool:
        """Return whether a direction can be timed."""
        return not self.refused and direction not in self.failed

    def errors_of(self, direction: str) -> dict[str, float]:
        """Return the errors of a direction's results."""
        names = {"forward": ("out",), "backward": ("dq", "dk", "dv")}.get(direction)
        return {name: e for name, e in self.errors.items() if names is None or name in names}


def refusal(backend: str, asked: Arrays, deterministic: bool = False) -> str:
    """Return why a backend does not support a shape; empty if it does."""
    here = Platform.here()
    request = capability.make_request(
        "backward", asked.q, asked.k, asked.mask, here, deterministic=deterministic
    )
    return capability.refusal(backend, request) or ""


def message(error: Exception) -> str:
    """Format an error in one line."""
    said = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def prepare(backend: str, asked: Arrays, yard: list[Arrays], wanted: tuple) -> Contender:
    """Compile a backend, run it forward and backward once, and compute its errors."""
    found = Contender(backend, refused=refusal(backend, asked))
    if found.refused:
        return found
    grads = None
    try:
        found.kernel = BackendPrograms(backend)
        found.saved = jax.block_until_ready(found.kernel.forward([asked]))
    except Exception as error:  # whatever a kernel or its compiler raises
        found.failed = dict.fromkeys(DIRECTIONS, message(error))
        return found
    try:
        found.saved_yard = jax.block_until_ready(found.kernel.forward(yard))
    except Exception as error:
        found.yard_failed = message(error)
    try:
        grads = jax.block_until_ready(found.kernel.backward([asked], found.saved))[0]
    except Exception as error:
        found.failed = dict.fromkeys(("backward", "both"), message(error))
    part = exactness.one_group(asked, found.saved[0][0], grads)[1]
    found.errors = exactness.errors(part, wanted)
    return found


def measure(
    shape: AttentionShape,
    backends: Sequence[str],
    dtype: str,
    repeats: int,
    log: Callable[[str], None],
) -> list[Row]:
    """Return a row for each direction and backend.

    The shape's yardstick is timed on each backend, interleaved with the rest.
    """
    what, alone = shape.yardstick()
    asked = draw(shape, dtype)
    yard = [draw(one, dtype, seed) for seed, one in enumerate(alone, start=1)]
    jax.block_until_ready((asked, yard))
    log(f"{shape}: float32 reference")
    with stage(f"{shape}: float32 reference"):
        wanted = exactness.exact(exactness.one_group(asked, None, None)[0])
    contenders = []
    for backend in backends:
        log(f"{shape}: compiling {backend}")
        with stage(f"{shape}: compiling {backend}"):
            contenders.append(prepare(backend, asked, yard, wanted))
    rows = []
    for direction in DIRECTIONS:
        able = [c for c in contenders if c.takes_part(direction)]
        log(f"{shape}: timing {direction}, {', '.join(c.backend for c in able) or 'nothing'}")
        programs: dict[tuple[str, bool], Callable] = {}
        for c in able:
            assert c.kernel is not None
            programs[c.backend, False] = c.kernel.program(direction, [asked], c.saved)
            if yard and not c.yard_failed:
                programs[c.backend, True] = c.kernel.program(direction, yard, c.saved_yard)
        with stage(f"{shape}: timing {direction}"):
            times = time_interleaved(programs, repeats)
        flops = shape.useful_flops(direction), sum(s.useful_flops(direction) for s in alone)
        start = conditions_of(shape, dtype) | {"direction": direction}
        rows += [start | row_of(c, direction, times, flops, what) for c in contenders]
    return rows


def conditions_of(shape: AttentionShape, dtype: str) -> Row:
    """Return a row's entries for the shape."""
    row: Row = {"shape": shape.name, "kind": shape.kind, **shape.size, "dtype": dtype}
    if shape.documents:
        row["documents"] = list(shape.documents)
    return row | ({"window": shape.window} if shape.window else {})


def row_of(contender: Contender, direction: str, times: dict, flops, what: str) -> Row:
    """Return the figures of a backend in one direction.

    Args:     times: by (backend, is yardstick). flops: of the shape and of the yardstick.
    """
    backend = contender.backend
    row: Row = {"backend": backend}
    if contender.refused:
        return row | {"refused": contender.refused}
    if direction in contender.failed:
        return row | {"failed": contender.failed[direction]}
    found = times[backend, False]
    if isinstance(found, Exception):
        return row | {"failed": message(found)}
    row |= figures(found, flops[0])
    against = times.get((RIVAL, False))
    if isinstance(against, Timing):
        row["times_cudnn"] = against.ms / found.ms
    if what:
        yard = times.get((backend, True), contender.yard_failed)
        row["yardstick"] = against_yardstick(what, found, yard, flops)
    errors = contender.errors_of(direction)
    off = exactness.wrong(errors)
    return row | {"error": errors} | ({"failed": off} if off else {})


def figures(found: Timing, flops: float) -> Row:
    """Return a time and its rate."""
    spread = {"ms_fastest": found.fastest, "ms_slowest": found.slowest, "launches": found.launches}
    return {"ms": found.ms, **spread, "useful_flops": flops, "tflops": flops / found.ms / 1e9}


def against_yardstick(what: str, found: Timing, yard: Timing | Exception | str, flops) -> Row:
    """Return time per useful FLOP relative to the yardstick: 1 if the mask has no cost."""
    if not isinstance(yard, Timing):
        return {"what": what, "failed": yard if isinstance(yard, str) else message(yard)}
    ratio = (found.ms / flops[0]) / (yard.ms / flops[1])
    return {"what": what, "ms": yard.ms, "tflops": flops[1] / yard.ms / 1e9, "ratio": ratio}
