"""Measure starts and batches on large data: python scripts/measure/large_data.py [--tokens 1e12]

Makes a sparse dataset of each size in --parts parts, with a document in 10,000 tokens, and prints a
line of JSON for each: what a process needs to open it and to make batches of 512 sequences of
4,096 tokens, beyond its imports. Then a dataset of --cold-gb of random tokens, of which nothing is
in memory: the bytes that are read from the disk, divided by those of the batches. The folder must
be on a disk with sparse files, and have space for 8 bytes per document and for --cold-gb.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxpar.config import Config, ParallelConfig, replace
from jaxpar.data.formats.arrays import most_documents
from jaxpar.data.formats.meta import Part, documents_file, tokens_file
from jaxpar.data.formats.writer import write_meta
from jaxpar.data.loader import Loader
from jaxpar.data.tokenizer import NoTokenizer
from jaxpar.runtime import progress
from jaxpar.sharding.mesh import make_mesh

BATCH, LENGTH, BATCHES, DOCUMENT, VOCAB = 512, 4096, 10, 10_000, 1 << 17


def make(folder: Path, num_tokens: int, num_parts: int, written: bool) -> None:
    """Make a dataset of random documents. Args:     written: with tokens; otherwise, sparse."""
    rng, parts, each = np.random.default_rng(0), list[Part](), num_tokens // num_parts
    lengths = rng.integers(1, 2 * DOCUMENT, each // DOCUMENT)
    offsets = np.append(0, np.cumsum(lengths) * (each / lengths.sum())).astype(np.int64)
    offsets[-1] = each
    starts = tuple(most_documents(offsets))
    for number in range(num_parts):
        name = f"part-{number:05}/train"
        (folder / name).parent.mkdir(parents=True)
        np.save(folder / documents_file(name), offsets)
        with open(folder / tokens_file(name), "wb") as file:
            if written:
                for _ in range(0, each, 1 << 22):
                    file.write(rng.integers(0, VOCAB, 1 << 22, dtype=np.uint32))
            file.truncate(4 * each)
        part = Part(
            name=name,
            num_tokens=each,
            num_documents=len(lengths),
            num_bytes=0,
            sha256="0" * 64,
            documents_sha256="0" * 64,
            tokens_hash="0" * 16,
            documents_hash="0" * 16,
            most_documents=starts,
        )
        parts.append(part)
    splits, counts = {"train": parts, "val": parts[:1]}, np.ones(VOCAB, np.int64)
    write_meta(folder, NoTokenizer(VOCAB, 0), counts, splits, inputs=("random",), holdout=0.0)


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for file in sorted(folder.rglob("*.*")):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_from_disk() -> int:
    """Return the bytes that this process has let the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def start(folder: str) -> dict[str, float]:
    """Open a dataset and make batches."""
    jax.config.update("jax_platforms", "cpu")
    mesh = make_mesh(ParallelConfig(data=1), jax.devices()[:1])
    values = {"data.path": folder, "data.seq_len": LENGTH, "model.vocab_size": VOCAB}
    cfg = replace(Config(), **values, **{"train.global_batch_size": BATCH})
    before, began, cpu = progress.reset_peak(), time.perf_counter(), time.process_time()
    loader = Loader(cfg, mesh)
    most = loader.max_documents
    found = {"start_seconds": time.perf_counter() - began, "start_cpu": time.process_time() - cpu}
    disk, rows = read_from_disk(), np.arange(BATCH)
    each = []
    for step in range(BATCHES):
        cpu = time.process_time()
        loader.host_rows(step, rows)
        each.append(time.process_time() - cpu)
    found["batch_cpu"] = statistics.median(each)
    found["read_ratio"] = (read_from_disk() - disk) / (BATCHES * BATCH * (LENGTH + 1) * 4)
    found["memory_mb"] = (progress.peak_memory() - before) / 1e6
    return found | {"tokens": loader.num_tokens, "max_documents": most}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each dataset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=float, nargs="*", default=[1e10, 1e11, 1e12])
    parser.add_argument("--parts", type=int, default=100)
    parser.add_argument("--cold-gb", type=float, default=2.0, help="0: no such dataset")
    parser.add_argument("--folder", help="on a disk (/var/tmp)", default="/var/tmp")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.start:
        print(json.dumps(start(options.start)), flush=True)
        return
    cases = [("sparse", int(number)) for number in options.tokens]
    cases += [("cold", int(options.cold_gb * 1e9 / 4))] * (options.cold_gb > 0)
    for name, num_tokens in cases:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            make(Path(folder), num_tokens, options.parts, name == "cold")
            if name == "cold":
                forget(Path(folder))
            command = [sys.executable, __file__, "--start", folder]
            found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            print(json.dumps({"data": name} | json.loads(found)), flush=True)


if __name__ == "__main__":
    main()
