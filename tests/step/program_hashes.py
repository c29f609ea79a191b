"""Hashes of lowered train steps: a change of the code that should change no program changes none.

    python -m tests.step.program_hashes             compare with the recorded table
    python -m tests.step.program_hashes --write     record it again, and print what changed
    python -m tests.step.program_hashes --only tensor lora --texts FOLDER    write texts to compare

The configs are those of `programs.py`. A step is traced and lowered to StableHLO, neither compiled
nor run; the text names no source line. Steps named `cuda: ...` are lowered for an H200, with or
without one: their Triton and Mosaic kernels are in the text.

A hash holds for one version of JAX. After a change that should change programs, record the table
again, and say in the commit which changed and why.
"""

import argparse
import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax

from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.kernels.platform import Platform, compiling_for
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state, state_shardings
from jaxpar.step.train_step import make_eval_step, make_gradient_step, make_train_step
from jaxpar.verification.traces import place_batch, random_batch
from tests.step.programs import CPU, CUDA, LARGE, TINY

TABLE = Path(__file__).with_name("program_hashes.json")

H200 = Platform("gpu", "NVIDIA H200", "9.0")

STEPS = {"train": make_train_step, "eval": make_eval_step, "gradient": make_gradient_step}

#: Configs whose evaluation and gradient steps are lowered too.
MORE_STEPS = ("tensor", "float8", "pipeline")

#: What embeds the body of a kernel in the text.
KERNEL = re.compile(r'\b(module|ir|kernel_hash|backend_config) = "((?:[^"\\]|\\.){24,})"')


def programs() -> Iterator[tuple[str, dict, str, bool]]:
    """Name, config fields, step and whether it is lowered for CUDA, of every program."""
    for name, changes in CPU.items():
        yield name, TINY | changes, "train", False
    for name in MORE_STEPS:
        for step in ("eval", "gradient"):
            yield f"{step}: {name}", TINY | CPU[name], step, False
    for name, changes in CUDA.items():
        yield name, LARGE | changes, "train", True


def lowered(fields: dict, step: str, cuda: bool) -> str:
    """StableHLO of one step on 8 devices, without the bodies of kernels."""
    cfg = resolve(replace(Config(), **fields), 8)
    mesh = make_mesh(cfg.parallel)

    def placed(a, sharding):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    state = jax.tree.map(placed, abstract_state(cfg), state_shardings(cfg, mesh))
    batch = jax.tree.map(lambda a: placed(a, a.sharding), place_batch(random_batch(cfg), cfg, mesh))
    with for_h200() if cuda else contextlib.nullcontext():
        traced = STEPS[step](cfg, mesh).trace(state if step == "train" else state.params, batch)
        platforms = {"lowering_platforms": ("cuda",)} if cuda else {}
        text = traced.lower(**platforms).as_text()
    return KERNEL.sub(r'\1 = "..."', text)


@contextlib.contextmanager
def for_h200() -> Iterator[None]:
    """Lower for an H200. Triton asks which GPU is here, and there need be none."""
    triton = "jax._src.pallas.triton.gpu_info.get_device_kind"
    with compiling_for(H200), mock.patch(triton, lambda: H200.kind):
        yield


def digest_of(text: str) -> str:
    """The hash of a program's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hashes(only: list[str], texts: Path | None) -> dict[str, str]:
    """Name -> hash, of all programs or of those whose name holds one of these parts."""
    found = {}
    for name, fields, step, cuda in programs():
        if only and not any(part in name for part in only):
            continue
        text = lowered(fields, step, cuda)
        found[name] = digest_of(text)
        print(f"{found[name]}  {len(text) >> 10:5} KiB  {name}", flush=True)
        if texts:
            texts.mkdir(parents=True, exist_ok=True)
            (texts / f"{re.sub(r'[ :,]+', '_', name)}.mlir").write_text(text)
    return found


def main() -> int:
    """The command line. Returns 1 if a program differs from the recorded one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts of names")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="write each text there")
    parser.add_argument("--write", action="store_true", help="record the hashes")
    options = parser.parse_args()
    recorded = json.loads(TABLE.read_text("utf-8"))
    if recorded["jax"] != jax.__version__ and not options.write:
        print(f"recorded with JAX {recorded['jax']}, this is {jax.__version__}: use --write")
        return 2
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    found = hashes(options.only, options.texts)
    known = recorded["programs"]
    changed = [name for name, digest in found.items() if known.get(name) != digest]
    print(f"{len(found)} programs, {len(changed)} changed" + "".join(f"\n  {n}" for n in changed))
    if options.write:
        kept = known if options.only else {}
        table = {"jax": jax.__version__, "programs": kept | found}
        TABLE.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    return 1 if changed and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
