"""Measure the loader on the host: python scripts/measure/loader.py [--seq-len 1024] [--batch 32]

Writes 64M random tokens in documents of 700 on average, in three formats, and times packed batches
with document masking: one source, and mixtures of two and three. Runs alternate. Each line has the
median and the range. No accelerator is used.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxpar.config import Config, ParallelConfig, Source, replace
from jaxpar.data.formats.convert import convert
from jaxpar.data.loader import Loader
from jaxpar.data.options import ConvertOptions
from jaxpar.sharding.mesh import make_mesh

NUM_TOKENS, EOS, VOCAB = 1 << 26, 0, 32_000


def make_sources(folder: Path) -> dict[str, str]:
    """Write the same number of tokens as a dataset folder, a Megatron pair and a nanoGPT file."""
    rng = np.random.default_rng(0)
    paths = {kind: str(folder / kind) for kind in ("jaxpar", "megatron", "nanogpt")}
    for kind, path in paths.items():
        tokens = rng.integers(1, VOCAB, NUM_TOKENS).astype("<u2")
        tokens[rng.random(NUM_TOKENS) < 1 / 700] = EOS
        flat = folder / f"{kind}.tokens.bin"
        tokens.tofile(flat)
        if kind == "nanogpt":
            paths[kind] = str(flat)
            continue
        convert(ConvertOptions(input=(str(flat),), output=path, to=kind, eos_id=EOS))
    return paths


def rate(loader: Loader, first: int, steps: int, batch: int, seq_len: int) -> float:
    """Return millions of tokens per second over some steps."""
    rows = np.arange(batch)
    began = time.perf_counter()
    for step in range(first, first + steps):
        loader.host_rows(step, rows)
    return steps * batch * seq_len / (time.perf_counter() - began) / 1e6


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    for name, value in vars(args).items():
        if value < 1:
            option = f"--{name.replace('_', '-')}"
            fix = f"{option} {parser.get_default(name)}"
            parser.error(f"{option} = {value}: must be at least 1. Fix: {fix}")
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        paths = make_sources(Path(folder))
        a, b, c = paths.values()
        cases = {"one source": (), "two": (Source(a, 0.7), Source(b, 0.3))}
        cases["three"] = (Source(a, 0.6), Source(b, 0.3), Source(c, 0.1))
        values = {"data.path": a, "data.seq_len": args.seq_len, "data.eos_id": EOS}
        values |= {"train.global_batch_size": args.batch, "model.vocab_size": VOCAB}
        mesh = make_mesh(ParallelConfig(data=1), jax.devices()[:1])
        loaders = {
            name: Loader(replace(Config(), **values | {"data.mixture": mixture}), mesh)
            for name, mixture in cases.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in cases}
        for repeat in range(args.repeats + 1):  # the first fills the page cache
            for name, loader in loaders.items():
                first = repeat * args.steps
                found = rate(loader, first, args.steps, args.batch, args.seq_len)
                rates[name] += [found] if repeat else []
    print(f"{os.cpu_count()} cores, {args.batch} x {args.seq_len}, NumPy {np.__version__}")
    for name, found in rates.items():
        low, middle, high = np.percentile(found, [0, 50, 100])
        share = np.median(np.divide(found, rates["one source"]))
        print(
            f"{name:12} {middle:6.1f} Mtok/s ({low:.1f} to {high:.1f}), {share:.3f} of one source"
        )


if __name__ == "__main__":
    main()
