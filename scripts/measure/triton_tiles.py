"""Time the tile sizes of the Triton attention kernels: python scripts/measure/triton_tiles.py

Times the forward and the two kernels of the backward over tile sizes, at causal shapes, beside
cuDNN and, on Hopper, jaxpar's kernels for it. First come all sizes at the first shape of each head
dim; the fastest few of each kernel then run at the other shapes. Rates count two products of the
allowed pairs in a forward, and five in a backward. Errors are relative to cuDNN, and "wrong" marks
those above 1e-2. At the end, whole passes with the fastest sizes are timed beside the others.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxpar.kernels.attention import api, capability  # noqa: E402
from jaxpar.kernels.attention.choice import choose  # noqa: E402
from jaxpar.kernels.attention.sinks import delta  # noqa: E402
from jaxpar.kernels.attention.tiles import bounds_of, key_visits, query_visits  # noqa: E402
from jaxpar.kernels.attention.triton import backward, forward  # noqa: E402
from jaxpar.kernels.attention.triton.blocks import TritonBackward, TritonForward  # noqa: E402
from jaxpar.kernels.attention.triton.shape import LOG2E  # noqa: E402
from jaxpar.kernels.platform import Platform  # noqa: E402
from scripts.measure.attention_shapes import AttentionShape, draw, parse_shapes  # noqa: E402
from scripts.measure.interleaved import Timing, time_interleaved  # noqa: E402

SHAPES = ["2,8192,32,8,128", "4,4096,32,8,128", "1,32768,32,8,128", "8,4096,32,8,64"]

#: By kernel and head dim: rows of queries, rows of keys, warps, stages; in a forward, and overlap.
SIZES: dict[str, dict[int, str]] = {
    "forward": {
        64: "128,64,8,3,0 128,64,4,3,0 64,64,4,3,0 64,64,4,3,1 64,128,4,3,1 128,64,8,3,1 "
        "128,128,8,3,0 128,32,4,4,0",
        128: "128,128,8,3,1 128,128,8,3,0 128,64,8,3,0 128,64,8,4,0 128,64,8,4,1 64,64,4,3,1 "
        "64,64,4,3,0 128,32,4,4,1",
        256: "64,64,4,2,0 64,64,4,2,1 128,64,8,2,0 128,32,8,2,1 64,32,4,2,1",
    },
    "keys": {
        64: "64,64,4,3 128,64,4,2 32,64,4,3 32,128,4,2 64,64,4,2 64,128,8,3",
        128: "64,64,4,2 64,128,8,3 64,128,8,4 64,128,8,2 32,128,8,3",
        256: "32,64,8,2 32,64,8,1 32,64,4,2 32,32,4,2 16,64,4,2",
    },
    "queries": {
        64: "64,64,4,2 64,64,4,3 128,64,4,3 128,64,8,3 128,64,8,2",
        128: "128,32,4,3 128,64,8,3 128,64,8,4 64,64,4,2 128,128,8,2",
        256: "64,32,4,2 64,64,8,2 64,64,4,2 64,32,4,3 128,32,8,2",
    },
}

#: Sizes that run at further shapes of a head dim.
FASTEST = 2
#: A larger error is no rounding.
WRONG = 1e-2


class Problem:
    """One shape: its arrays, and cuDNN's results."""

    def __init__(self, shape: AttentionShape):
        self.shape, self.x = shape, draw(shape, "bfloat16")
        x, cudnn = self.x, api.BACKENDS["cudnn"]
        self.out, self.lse = jax.jit(cudnn.forward)(x.q, x.k, x.v, x.mask)
        self.d_lse = jnp.zeros_like(self.lse)
        per_row = lambda out, lse: (lse * LOG2E, delta(out, x.d_out, 0.0))  # noqa: E731
        self.rows = jax.jit(per_row)(self.out, self.lse)
        saved = self.out, self.lse, x.d_out, self.d_lse
        self.grads = jax.jit(cudnn.backward)(x.q, x.k, x.v, x.mask, *saved)

    def wanted(self, kernel: str) -> Sequence[jax.Array]:
        """Return cuDNN's results for a kernel."""
        parts = {"forward": [self.out], "keys": self.grads[1:], "queries": self.grads[:1]}
        return parts.get(kernel, self.grads)

    def program(self, kernel: str, sizes: tuple[int, ...]) -> tuple[Callable, tuple]:
        """Return a kernel with tile sizes, and its arguments."""
        x, s, (q, kv) = self.x, self.shape, sizes[:2]
        if kernel == "forward":
            blocks = TritonForward(*sizes[:4], overlap=bool(sizes[4]))

            def run_forward(*arrays):
                bounds = bounds_of(x.mask, 0, 0)
                visits = query_visits(bounds, q, kv, s.S)
                return forward.forward(*arrays, bounds, visits, blocks, False)[:1]

            return run_forward, (x.q, x.k, x.v)
        both = TritonBackward(*sizes[:4], *sizes[:4])

        def run_backward(*operands):
            bounds = bounds_of(x.mask, 0, 0)
            if kernel == "keys":
                visits = key_visits(bounds, q, kv, s.T, s.S)
                return backward.key_gradients(operands, bounds, visits, both, False)
            visits = query_visits(bounds, q, kv, s.S)
            return [backward.query_gradient(operands, bounds, visits, both, False)]

        return run_backward, (x.q, x.k, x.v, x.d_out, *self.rows)

    def whole(self, direction: str, backend: str, options: dict) -> tuple[Callable, tuple]:
        """Return a direction of a backend, and its arguments."""
        x, module = self.x, api.BACKENDS[backend]
        if direction == "forward":
            return lambda *a: module.forward(*a, **options)[:1], (x.q, x.k, x.v, x.mask)
        saved = self.out, self.lse, x.d_out, self.d_lse
        return lambda *a: module.backward(*a, **options), (x.q, x.k, x.v, x.mask, *saved)


@dataclasses.dataclass
class Entry:
    """A program to time."""

    problem: Problem
    kernel: str
    name: Any
    compiled: Future
    arguments: tuple
    error: float = 0.0
    said: str = ""
    ms: float = 0.0


def compiled(pool, problem: Problem, kernel: str, name, program, arguments) -> Entry:
    """Start to compile a program."""
    lowered = jax.jit(program).lower(*arguments)
    return Entry(problem, kernel, name, pool.submit(lowered.compile), arguments)


def timed(entries: Sequence[Entry], repeats: int) -> None:
    """Check and time programs, interleaved."""
    for e in entries:
        try:
            found = e.compiled.result()(*e.arguments)
            e.error = max(map(relative, found, e.problem.wanted(e.kernel)))
        except Exception as error:
            e.said = str(error).strip().split("\n")[0][:90]
    able = {i: e for i, e in enumerate(entries) if not e.said}
    programs = {i: lambda e=e: e.compiled.result()(*e.arguments) for i, e in able.items()}
    for i, found in time_interleaved(programs, repeats).items():
        if isinstance(found, Timing):
            able[i].ms = found.ms
        else:
            able[i].said = str(found).split("\n")[0][:90]


def relative(found: jax.Array, wanted: jax.Array) -> float:
    """Return the relative error in the L2 norm."""
    a, b = (x.astype(jnp.float32) for x in (found, wanted))
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def show(entries: Sequence[Entry]) -> None:
    """Print entries, the fastest first; rates are those of whole passes."""
    for e in sorted(entries, key=lambda e: e.ms or 1e9):
        direction = "forward" if e.kernel == "forward" else "backward"
        rate = e.problem.shape.useful_flops(direction) / e.ms / 1e9 if e.ms else 0.0
        said = e.said or ("wrong" if not e.error <= WRONG else "")
        of = f"{rate:7.1f}" if e.kernel in ("forward", "backward") else " " * 7
        name = ",".join(map(str, e.name)) if isinstance(e.name, tuple) else e.name
        print(f"  {e.kernel:9s} {name:24s} {e.ms:9.3f} ms {of}  {e.error:.1e} {said}", flush=True)


def sizes_of(kernel: str, head_dim: int) -> Iterator[tuple[int, ...]]:
    """Return the sizes to try."""
    for words in SIZES[kernel][head_dim].split():
        yield tuple(map(int, words.split(",")))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="causal B,T,H,G,D")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    began, here = time.perf_counter(), Platform.here()
    print(f"{here.kind}, compute capability {here.compute_capability}, JAX {jax.__version__}")
    best: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    with ThreadPoolExecutor(12) as pool:
        for shape in parse_shapes(options.shapes):
            problem = Problem(shape)
            entries = []
            for kernel in SIZES:
                for sizes in best.get((kernel, shape.D)) or sizes_of(kernel, shape.D):
                    program = problem.program(kernel, sizes)
                    entries.append(compiled(pool, problem, kernel, sizes, *program))
            print(f"\n{shape}", flush=True)
            for kernel in SIZES:
                mine = [e for e in entries if e.kernel == kernel]
                timed(mine, options.repeats)
                show(mine)
                good = [e for e in mine if e.ms and e.error <= WRONG]
                good.sort(key=lambda e: e.ms)
                best[kernel, shape.D] = [e.name for e in good[:FASTEST]]
            contest(pool, problem, {k: best[k, shape.D][0] for k in SIZES}, options.repeats)
            print(f"  {time.perf_counter() - began:.0f} s so far", flush=True)


def contest(pool, problem: Problem, fastest: dict[str, tuple[int, ...]], repeats: int) -> None:
    """Time whole passes with the fastest sizes, beside the other backends."""
    x = problem.x
    request = capability.make_request("backward", x.q, x.k, x.mask, Platform.here())
    blocks = {
        "forward": TritonForward(*fastest["forward"][:4], overlap=bool(fastest["forward"][4])),
        "backward": TritonBackward(*fastest["keys"], *fastest["queries"]),
    }
    for direction in ("forward", "backward"):
        entries = []
        for backend in ("cudnn", "pallas_hopper", "triton"):
            if backend != "triton" and capability.refusal(backend, request):
                continue
            sizes = blocks[direction]
            if backend != "triton":
                choice = choose(backend, x.q, x.k, x.mask)
                sizes = getattr(choice, f"{direction}_blocks")
            given = {} if sizes is None else {"blocks": sizes}
            program = problem.whole(direction, backend, given)
            entries.append(compiled(pool, problem, direction, backend, *program))
        timed(entries, repeats + 2)
        show(entries)
        by_name = {e.name: e.ms for e in entries}
        if by_name.get("cudnn") and by_name.get("triton"):
            print(f"  {direction}: {by_name['cudnn'] / by_name['triton']:.2f} x cuDNN")


if __name__ == "__main__":
    main()
