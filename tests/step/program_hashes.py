"""Hashes of lowered programs: a change of the code that should change no program changes none.

    python -m tests.step.program_hashes             compare with the recorded table
    python -m tests.step.program_hashes --seeds 1 2 3    the same under each PYTHONHASHSEED
    python -m tests.step.program_hashes --write     record it again, and print what changed
    python -m tests.step.program_hashes --only tensor lora --texts FOLDER    write texts to compare

The configs are those of `programs.py` and `more_programs.py`; the programs are steps of every kind,
outer steps of DiLoCo, and those of text generation (`traced.py`). A program is traced and lowered
to StableHLO, neither compiled nor run; the text names no source line. Programs named `cuda: ...`
are lowered for an H200, with or without one: the bodies of their Triton and Mosaic kernels have
hashes of their own, by program and kernel.

A hash holds for one version of JAX. After a change that should change programs, record the table
again, and say in the commit which changed and why.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from jaxpar.kernels.platform import Platform, compiling_for
from tests.kernels.triton_sources import sources
from tests.step.kernel_bodies import Kernel, digest_of, kernels_of, without_bodies
from tests.step.more_programs import (
    CUDA_MODELS,
    DRAFTING,
    MODELS,
    OTHER,
    SAMPLED,
    fields_of,
)
from tests.step.programs import CPU, CUDA, LARGE, TINY
from tests.step.traced import DEVICES, trace

TABLE = Path(__file__).with_name("program_hashes.json")
ROOT = TABLE.parents[2]

H200 = Platform("gpu", "NVIDIA H200", "9.0")

#: Configs whose evaluation and gradient steps are lowered too.
MORE_STEPS = ("tensor", "float8", "pipeline")


class Program(NamedTuple):
    """A program of the table."""

    name: str
    fields: dict
    step: str
    cuda: bool


class Lowered(NamedTuple):
    """A lowered program, and the bodies of its kernels."""

    text: str
    kernels: list[Kernel]

    @property
    def digest(self) -> str:
        """The hash of the text."""
        return digest_of(self.text.encode())


def programs() -> Iterator[Program]:
    """Every program."""
    for name, changes in CPU.items():
        yield Program(name, TINY | changes, "train", False)
    for name in MORE_STEPS:
        for step in ("eval", "gradient"):
            yield Program(f"{step}: {name}", TINY | CPU[name], step, False)
    for name, changes in CUDA.items():
        yield Program(name, LARGE | changes, "train", True)
    for name, changes in MODELS.items():
        yield Program(name, TINY | changes, "train", False)
    for step, names in OTHER.items():
        for name in names:
            yield Program(f"{step}: {name}", TINY | fields_of(name), step, False)
    for name, changes in SAMPLED.items():
        for step in ("prefill", "tokens, tensor"):
            yield Program(f"{step}: {name}", TINY | changes, step, False)
    for name, changes in DRAFTING.items():
        for step in ("drafts, prefill", "drafts, rounds"):
            yield Program(f"{step}: {name}", TINY | changes, step, False)
    for step in ("prefill, tensor", "tokens", "scoring"):
        yield Program(f"{step}: dense", TINY, step, False)
    for name in ("dense", "latent", "kda"):
        yield Program(f"fuse: {name}", TINY | SAMPLED[name], "fuse", False)
    for name, changes in CUDA_MODELS.items():
        yield Program(name, LARGE | changes, "train", True)


def lowered(fields: dict, step: str, cuda: bool) -> Lowered:
    """Lower a program for 8 devices, or those that text generation takes."""
    with for_h200() if cuda else contextlib.nullcontext():
        traced = trace(fields, step)
        platforms = {"lowering_platforms": ("cuda",)} if cuda else {}
        text = traced.lower(**platforms).as_text()
    return Lowered(without_bodies(text), kernels_of(text))


@contextlib.contextmanager
def for_h200() -> Iterator[None]:
    """Lower for an H200. Triton kernels are their source, which does not need Triton."""
    with compiling_for(H200), sources():
        yield


def lowered_programs(only: list[str], texts: Path | None) -> Iterator[tuple[str, Lowered]]:
    """Lower all programs, or those whose name holds one of these parts, one after the other."""
    for name, fields, step, cuda in programs():
        if only and not any(part in name for part in only):
            continue
        one = lowered(fields, step, cuda)
        size, kernels = len(one.text) >> 10, len(one.kernels)
        print(f"{one.digest}  {size:5} KiB  {kernels:2} kernels  {name}", flush=True)
        if texts:
            write_texts(texts, name, one)
        yield name, one


def write_texts(folder: Path, name: str, program: Lowered) -> None:
    """Write a program's text, and those of its kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[ :,]+", "_", name)
    (folder / f"{stem}.mlir").write_text(program.text)
    for number, kernel in enumerate(program.kernels):
        (folder / f"{stem}.kernel_{number}_{kernel.name}.mlir").write_text(kernel.text())


def differences(recorded: dict, name: str, found: Lowered) -> list[str]:
    """Say what of a program differs from the recorded one: the program, and kernels that only one
    of both has."""
    before, now = recorded["kernels"].get(name, []), list(map(str, found.kernels))
    lines = [] if recorded["programs"].get(name) == found.digest else [name]
    lines += [f"{name}: no longer has kernel {k}" for k in before if k not in now]
    lines += [f"{name}: new kernel {k}" for k in now if k not in before]
    return lines


def under_seeds(seeds: list[int], only: list[str]) -> int:
    """Compare with the table under each PYTHONHASHSEED, until a program differs. Returns: 1 if one
    does."""
    for seed in seeds:
        print(f"PYTHONHASHSEED={seed}", flush=True)
        command = [sys.executable, "-m", "tests.step.program_hashes", "--first"]
        command += ["--only", *only] if only else []
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        start = time.monotonic()
        if code := subprocess.run(command, cwd=ROOT, env=environment).returncode:
            print(f"not as recorded under PYTHONHASHSEED={seed}")
            return code
        print(f"equal under PYTHONHASHSEED={seed}, in {time.monotonic() - start:.0f} s", flush=True)
    return 0


def main() -> int:
    """The command line. Returns 1 if a program differs from the recorded one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts of names")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="write each text there")
    parser.add_argument("--seeds", type=int, nargs="*", metavar="N", help="PYTHONHASHSEEDs")
    parser.add_argument("--first", action="store_true", help="stop at the first that changed")
    parser.add_argument("--write", action="store_true", help="record the hashes")
    options = parser.parse_args()
    recorded = json.loads(TABLE.read_text("utf-8"))
    if recorded["jax"] != jax.__version__ and not options.write:
        print(f"recorded with JAX {recorded['jax']}, this is {jax.__version__}: use --write")
        return 2
    if options.seeds:
        return under_seeds(options.seeds, options.only)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_traceback_in_locations_limit", 1)  # quicker; hashes are without places
    found: dict[str, Lowered] = {}
    changed: dict[str, list[str]] = {}
    for name, one in lowered_programs(options.only, options.texts):
        found[name] = one
        if lines := differences(recorded, name, one):
            changed[name] = lines
            if options.first:
                break
    lines = [line for of_program in changed.values() for line in of_program]
    print(f"{len(found)} programs, {len(changed)} changed", *lines, sep="\n  ")
    if options.write:
        write(found, recorded if options.only else {})
    return 1 if changed and not options.write else 0


def write(found: dict[str, Lowered], kept: dict) -> None:
    """Record hashes, in the order of `programs`, beside those that are kept."""
    texts = {name: one.digest for name, one in found.items()}
    kernels = {name: list(map(str, one.kernels)) for name, one in found.items() if one.kernels}
    before = {
        part: {name: value for name, value in kept.get(part, {}).items() if name not in found}
        for part in ("programs", "kernels")
    }
    parts = {"programs": before["programs"] | texts, "kernels": before["kernels"] | kernels}
    table = {
        part: {p.name: values[p.name] for p in programs() if p.name in values}
        for part, values in parts.items()
    }
    TABLE.write_text(json.dumps({"jax": jax.__version__, **table}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
