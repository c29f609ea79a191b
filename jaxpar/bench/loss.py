"""Measure the loss: python -m jaxpar.bench loss [--tokens 8192,32768] [--vocab 128256] [...]

Compares jaxpar's loss, which computes logits in chunks, with autodiff of the full logits. Prints
the peak memory of loss and gradients in addition to inputs and results, from XLA's memory analysis,
and on a GPU the time.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.bench.timing import Timing, time_interleaved
from jaxpar.bench.training import conditions
from jaxpar.config import Config, ConfigError, ParallelConfig
from jaxpar.config.numerals import only_digits
from jaxpar.config.rules.limits import MAX_INT, Range, most_of
from jaxpar.model.loss import cross_entropy, num_chunks
from jaxpar.parallel.collectives import varying
from jaxpar.runtime import exit_codes, provenance
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import json_output
from jaxpar.runtime.options import check_file
from jaxpar.runtime.options import parser as make_parser
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.sharding.mesh import make_mesh

GIB = 1 << 30


def ours(h_ND, head_DV, labels_N, chunks: int, logits_dtype: Any):
    """Compute loss and gradients with `model/loss.py`, on one device."""

    def local(h, head, labels):
        how = dict(logits_dtype=logits_dtype, chunks=chunks)
        run = functools.partial(cross_entropy, labels_N=labels, **how)
        (total, nll), vjp = jax.vjp(run, varying(h), varying(head))
        return jax.lax.psum(total, total_axes), *vjp((jnp.ones_like(total), jnp.zeros_like(nll)))

    mesh = make_mesh(ParallelConfig(data=1), jax.devices()[:1])
    total_axes = mesh.axis_names
    whole = PartitionSpec()
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(whole, whole, whole), out_specs=whole, check_vma=False
    )
    return run(h_ND, head_DV, labels_N)


def plain(h_ND, head_DV, labels_N):
    """Compute loss and gradients from full logits, by autodiff."""

    def total(h, head):
        logits = jnp.dot(h, head, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, labels_N[:, None], axis=1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen)

    value, grads = jax.value_and_grad(total, argnums=(0, 1))(h_ND, head_DV)
    return value, *grads


def temporary_gib(program: Callable, arguments: Sequence[jax.ShapeDtypeStruct]) -> float:
    """Return a compiled program's peak memory in addition to arguments and results."""
    analysis = jax.jit(program).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes / GIB


def read_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options."""
    parser = make_parser("python -m jaxpar.bench loss", __doc__, repeats=10)
    add = parser.add_argument
    add(
        "--tokens",
        default="8192,16384,32768",
        help="numbers of tokens, one per row of the output (%(default)s)",
    )
    vocab, width = (Range(1, most_of(f"model.{name}"), 4096) for name in ("vocab_size", "d_model"))
    parser.whole("--vocab", 128256, vocab, help="vocabulary size (%(default)s)")
    told = "parallel.loss_chunks (%(default)s: chunks of 1 GiB)"
    parser.whole("--chunks", 0, Range(0, 1 << 24, 1), help=told)
    add(
        "--logits-dtype",
        choices=("float32", "compute"),
        default="float32",
        help="dtype of jaxpar's logits",
    )
    parser.whole("--d-model", 4096, width, help="width of the hidden states (%(default)s)")
    options = parser.parse_args(argv)
    sizes = options.tokens.split(",")
    if not all(only_digits(n) and 0 < int(n) <= MAX_INT for n in sizes):
        rule = f"must be positive integers of at most {MAX_INT:,}, separated by commas"
        raise ConfigError("--tokens", options.tokens, rule, "use --tokens 8192,16384")
    check_file("--card", options.card)
    options.tokens = [int(n) for n in sizes]
    return options


def measure(tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one row of the output."""
    D, V = options.d_model, options.vocab
    struct = jax.ShapeDtypeStruct
    shapes = [struct((tokens, D), options.dtype), struct((D, V), options.dtype)]
    shapes.append(struct((tokens,), jnp.int32))
    logits = jnp.float32 if options.logits_dtype == "float32" else options.dtype
    own = functools.partial(ours, chunks=options.chunks, logits_dtype=logits)
    row: dict[str, Any] = {
        **{"tokens": tokens, "vocab": V, "d_model": D, "dtype": options.dtype},
        **{"logits_dtype": options.logits_dtype, "repeats": options.repeats},
        "logits_gib": tokens * V * 4 / GIB,
        "chunks": num_chunks(tokens, V, options.chunks),
        "ours_gib": temporary_gib(own, shapes),
        "plain_gib": temporary_gib(plain, shapes),
    }
    if jax.devices()[0].platform == "gpu":
        arrays = jax.block_until_ready([jnp.full(s.shape, 0.01, s.dtype) for s in shapes])
        call = lambda f: functools.partial(jax.jit(f), *arrays)  # noqa: E731
        times = time_interleaved({"ours": call(own), "plain": call(plain)}, options.repeats)
        for name, found in times.items():
            row[f"{name}_ms"] = found.ms if isinstance(found, Timing) else None
    return row


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    options = read_command(argv)
    rendezvous.require_single_process("jaxpar.bench loss")
    environment = runtime.start(Config())
    commit = options.commit or provenance.checked_out_commit()
    card = conditions.of_this_process(environment, commit) | {"what": "loss", "rows": []}
    columns = ["tokens", "vocab", "logits_gib", "chunks", "ours_gib", "plain_gib"]
    columns += ["ours_ms", "plain_ms"] if jax.devices()[0].platform == "gpu" else []
    print(
        "  ".join(name.replace("_gib", " GiB").replace("_ms", " ms").rjust(10) for name in columns)
    )
    for tokens in options.tokens:
        with stage(f"measuring {tokens:,} tokens"):
            row = measure(tokens, options)
        text = lambda x: f"{x:,.2f}" if isinstance(x, float) else f"{x:,}" if x else "-"  # noqa: E731
        print("  ".join(text(row[name]).rjust(10) for name in columns), flush=True)
        card["rows"].append(row)
        if options.card:  # after each row, so that a later failure keeps the earlier rows
            json_output.write("--card", options.card, card)
    return exit_codes.EXIT_OK
