"""Measure memory-bound operations: python scripts/measure/elementwise.py [--tokens N]

XLA's norm, SwiGLU, rotary embedding and residual add, forward and backward, and what we have a
kernel for, by XLA and, where it runs, by the kernel; at the sizes of Llama 3 8B on one device. For
each: the time, the bytes that must move (every input read and every output written once), the
rate, and its share of the rate of a large copy in the same process. A piece of XLA's near 1 is as
fast as a kernel of ours could make it by itself; what is left to gain is in fusing it into its
neighbors. A piece of less than some 0.03 ms, with few tokens, is the time of its launch.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Attention, Config, ConfigError, Glu, Layer, Model
from jaxpar.kernels import float8, softmax, swiglu
from jaxpar.kernels.float8 import rounding
from jaxpar.kernels.norm import rms_norm, rms_norm_beside
from jaxpar.kernels.platform import Platform
from jaxpar.model import feed_forward
from jaxpar.model import rope as model_rope
from jaxpar.runtime import provenance
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import outputs
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.program import run_program
from jaxpar.tools.bench import conditions
from scripts.measure.interleaved import Timing, time_interleaved

#: Llama 3 8B (2407.21783), table 3.
ATTENTION, GLU = Attention(num_heads=32, num_kv_heads=8, head_dim=128), Glu(14_336)
MODEL = Model(d_model=4096, vocab_size=128_256, layers=[Layer("layers", ATTENTION, GLU)] * 32)
#: Bytes that the copy reads and writes, far more than the caches, on a GPU and on a CPU.
COPY_BYTES, COPY_BYTES_CPU = 4 << 30, 64 << 20


@dataclass(frozen=True)
class Piece:
    """A part of the model: its program and arguments."""

    name: str
    program: Callable[..., Any]
    arguments: tuple
    in_place: bool = False
    """The first result takes the place of the only argument."""

    def call(self) -> Callable[[], Any]:
        """Return the compiled program. One that works in place takes its own results."""
        if not self.in_place:
            return functools.partial(jax.jit(self.program), *self.arguments)
        run, state = jax.jit(self.program, donate_argnums=0), [jnp.copy(self.arguments[0])]

        def in_place() -> Any:
            state[0], *rest = run(state[0])
            return rest

        return in_place

    def bytes_moved(self) -> int:
        """Return the bytes to read each argument once and write each result once."""
        results = jax.eval_shape(self.program, *self.arguments)
        sized = jax.tree.leaves((self.arguments, results))
        return sum(x.size * x.dtype.itemsize for x in sized)


def backward_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward: (cotangent, *arguments) -> gradients, recomputing the forward."""
    return lambda ct, *arguments: jax.vjp(function, *arguments)[1](ct)


def both(name: str, function: Callable[..., Any], *arguments) -> Iterator[Piece]:
    """Yield a piece forward and backward."""
    yield Piece(f"{name} forward", function, arguments)
    cotangent = normal(jax.eval_shape(function, *arguments).shape)
    yield Piece(f"{name} backward", backward_of(function), (cotangent, *arguments))


def normal(shape: tuple[int, ...]) -> jax.Array:
    """Return normal values in bfloat16."""
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def pieces(tokens: int) -> Iterator[Piece]:
    """Yield the pieces one at a time, since their arguments are large."""
    m, a = MODEL, ATTENTION
    x, y = normal((1, tokens, m.d_model)), normal((1, tokens, m.d_model))
    gain = jnp.ones(m.d_model, jnp.float32)
    norm = functools.partial(rms_norm, eps=m.norm.eps)
    yield from both("RMSNorm", norm, x, gain)
    yield Piece("RMSNorm beside x backward", backward_of(beside), ((x, y), x, gain))
    yield Piece("residual add", jnp.add, (x, y))
    yield Piece("residual add + RMSNorm", lambda x, y, g: (x + y, norm(x + y, g)), (x, y, gain))
    tables = model_rope.rope_tables(jnp.arange(tokens)[None], a.rope, a.head_dim)
    q, k = (normal((1, tokens, heads, a.head_dim)) for heads in (a.num_heads, a.num_kv_heads))
    yield Piece("RoPE of q and k forward", rope, (q, k, tables))
    yield Piece("RoPE of q and k backward", rope_backward, (q, k, tables))
    gate, up = normal((1, tokens, GLU.d_ff)), normal((1, tokens, GLU.d_ff))
    yield from both("SwiGLU", feed_forward.kernel_of(GLU).hidden, gate, up)


def pieces_of_kernels(tokens: int) -> Iterator[Piece]:
    """Yield what has a kernel, by XLA, and by the kernel if it runs here."""
    for name, by_xla, by_kernel, arguments, in_place in with_kernels(tokens):
        yield Piece(f"{name}, XLA", by_xla, arguments, in_place)
        if Platform.here().runs_elementwise_kernels:
            yield Piece(f"{name}, kernel", by_kernel, arguments, in_place)


def with_kernels(tokens: int) -> Iterator[tuple]:
    """Yield a name, the function of XLA and that of the kernel, arguments, and `Piece.in_place`."""
    m, one = MODEL, jnp.float32(1)
    by_xla, by_kernel = rounding._by_xla, rounding._by_kernel
    for name, x, dtype in (
        ("round norm", beside_unwritten(normal((tokens, m.d_model))), float8.FORWARD),
        ("round gradient", normal((tokens, GLU.d_ff)), float8.BACKWARD),
    ):
        both = (functools.partial(rounded, by, dtype) for by in (by_xla, by_kernel))
        yield name, *both, (x, one), False
    logits = (normal((tokens, m.vocab_size)),)
    both = softmax.exponentials_by_xla, softmax.exponentials_by_kernel
    exponentials = (functools.partial(by, dtype=jnp.bfloat16) for by in both)
    yield "exponentials", *exponentials, logits, True
    yield "sums of exponentials", softmax.sum_by_xla, softmax.sum_by_kernel, logits, False
    del logits
    gate_up, d_y = normal((tokens, 2 * GLU.d_ff)), normal((tokens, GLU.d_ff))
    scaled = gate_up, jnp.ones((tokens, 1), jnp.float32)
    amax = functools.partial(functools.partial, with_amax=True)
    for name, by_xla, by_kernel, rest in (
        ("SwiGLU", swiglu.forward_by_xla, swiglu.forward_by_kernel, ()),
        ("SwiGLU backward", swiglu.backward_by_xla, swiglu.backward_by_kernel, (d_y,)),
    ):
        yield f"{name}, scale", by_xla, by_kernel, (*scaled, *rest), False
        measured_by_xla = lambda *given, by=by_xla: swiglu._with_amax_by_xla(by(*given))  # noqa: E731
        yield f"{name}, largest", measured_by_xla, amax(by_kernel), (gate_up, None, *rest), False


def rounded(by, dtype, x, scale):
    """Call a function that rounds, with the dtype as it is."""
    return by(x, scale, dtype)


def beside_unwritten(x):
    """Return the norm of x as float8 rounds it, from x."""
    return rms_norm_beside(x, jnp.ones(MODEL.d_model, jnp.float32), MODEL.norm.eps)[1]


def beside(x, gain):
    """Return x and its norm, as in a layer."""
    x, normed = rms_norm_beside(x, gain, MODEL.norm.eps)
    return x, normed.written()


def rope(q, k, tables):
    """Rotate queries and keys, as in a layer."""
    return model_rope.rope(q, tables), model_rope.rope(k, tables)


def rope_backward(d_q, d_k, tables):
    """Return the gradients. RoPE is linear, so they need no values of the forward."""
    return jax.vjp(lambda q, k: rope(q, k, tables), d_q, d_k)[1]((d_q, d_k))


def copy_piece(num_bytes: int) -> Piece:
    """Return a copy. Adding a traced 0 prevents XLA from returning its argument."""
    big = jnp.zeros(num_bytes // 4, jnp.int32)
    return Piece("copy", lambda x, nothing: x + nothing, (big, jnp.int32(0)))


def measured(piece: Piece, repeats: int) -> tuple[float, float]:
    """Return milliseconds, and GB/s of the bytes moved."""
    found = time_interleaved({piece.name: piece.call()}, repeats)[piece.name]
    if not isinstance(found, Timing):
        raise found
    return found.ms, piece.bytes_moved() / found.ms / 1e6


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=16384, help="tokens on the device (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed batches (%(default)s)")
    parser.add_argument("--card", help="JSON file to which to write the figures")
    parser.add_argument("--commit", help="commit to record on the card, if there is no checkout")
    options = parser.parse_args(argv)
    for name in ("tokens", "repeats"):
        if getattr(options, name) < 1:
            fix = f"use --{name} {parser.get_default(name)}"
            parser.error(f"--{name} = {getattr(options, name)}: must be at least 1. Fix: {fix}")
    try:
        check_file("--card", options.card)
    except ConfigError as error:
        parser.error(str(error))
    environment = runtime.start(Config())
    commit = options.commit or provenance.checked_out_commit()
    card: dict[str, Any] = conditions.of_this_process(environment, commit)
    on_gpu = jax.devices()[0].platform == "gpu"
    _, peak = measured(copy_piece(COPY_BYTES if on_gpu else COPY_BYTES_CPU), options.repeats)
    card |= {"tokens": options.tokens, "copy_gb_per_second": peak, "rows": []}
    print(f"{card['device']}, {options.tokens:,} tokens, bfloat16; a copy moves {peak:,.0f} GB/s")
    print(f"{'':32}{'ms':>9}{'MB':>9}{'GB/s':>9}{'of copy':>9}")
    for piece in itertools.chain(pieces(options.tokens), pieces_of_kernels(options.tokens)):
        ms, rate = measured(piece, options.repeats)
        size = piece.bytes_moved()
        print(f"{piece.name:32}{ms:9.4f}{size / 1e6:9.1f}{rate:9.0f}{rate / peak:9.2f}", flush=True)
        row = {"piece": piece.name, "ms": ms, "bytes": size, "gb_per_second": rate}
        card["rows"].append(row | {"share_of_copy": rate / peak})
    if options.card:
        outputs.write_json("--card", options.card, card)


if __name__ == "__main__":
    run_program(main)
