"""A change of structure changes no lowered program: the hashes that `program_hashes.py` records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpar.kernels.attention.triton.compiler import launch
from tests.step import kernel_bodies, program_hashes, programs

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads(program_hashes.TABLE.read_text("utf-8"))

of_this_jax = pytest.mark.skipif(
    RECORDED["jax"] != jax.__version__, reason=f"hashes were recorded with JAX {RECORDED['jax']}"
)


def ended(*options: str, **environment: str) -> subprocess.CompletedProcess:
    """The command, apart, as the table is written."""
    command = [sys.executable, "-m", "tests.step.program_hashes", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@of_this_jax
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_program_is_the_recorded_one():
    run = ended()
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


#: Models whose arrays and layers have the most names.
OF_MANY_NAMES = ("latent, lora", "deepseek, mtp", "kda, meshes", "mamba, experts", "cuda: latent")


@of_this_jax
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_do_not_depend_on_the_hash_seed():
    run = ended("--only", *OF_MANY_NAMES, "--seeds", "1", "2", "3")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert all(f"equal under PYTHONHASHSEED={seed}" in run.stdout for seed in (1, 2, 3))


@pytest.fixture
def as_recorded():
    """Without these tests' precision, which is in the text."""
    with jax.default_matmul_precision(None):
        yield


@of_this_jax
@pytest.mark.parametrize("name", ["fsdp", "outer step: diloco", "tokens, tensor: dense"])
def test_some_programs_are_the_recorded_ones(name, as_recorded):
    _, *program = next(p for p in program_hashes.programs() if p.name == name)
    assert program_hashes.lowered(*program).digest == RECORDED["programs"][name]


def test_every_program_is_recorded():
    names = [program.name for program in program_hashes.programs()]
    assert names == list(RECORDED["programs"]) == list(dict.fromkeys(names))
    assert set(RECORDED["kernels"]) <= {name for name in names if name.startswith("cuda: ")}


@of_this_jax
def test_a_changed_program_is_seen(as_recorded):
    found = program_hashes.lowered(
        programs.TINY | {"model.layers.feed_forward.d_ff": 256}, "fuse", cuda=False
    )
    assert program_hashes.differences(RECORDED, "fuse: dense", found) == ["fuse: dense"]


def test_a_changed_kernel_is_seen():
    kernels = [kernel_bodies.Kernel(name, name.encode()) for name in ("first", "second")]
    found = program_hashes.Lowered("text", kernels)
    table = {"programs": {"p": found.digest}, "kernels": {"p": list(map(str, kernels))}}
    assert program_hashes.differences(table, "p", found) == []
    other = kernel_bodies.Kernel("first", b"other")
    assert program_hashes.differences(table, "p", found._replace(kernels=[other, kernels[1]])) == [
        f"p: no longer has kernel {kernels[0]}",
        f"p: new kernel {other}",
    ]


def body(lines: int, factor: float) -> kernel_bodies.Kernel:
    """The body of a kernel that multiplies, defined some lines below."""
    source = "\n" * lines + f"def kernel(x, y): y[...] = x[...] * {factor}"
    names: dict = {}
    exec(compile(source, "somewhere.py", "exec"), names)
    x = jax.ShapeDtypeStruct((128,), "float32")
    how = dict(programs=1, warps=4, stages=1, name="kernel", interpret=False)
    with program_hashes.for_h200():
        call = jax.jit(lambda x: launch(names["kernel"], [x], [(x.shape, x.dtype)], **how))
        lowered = call.trace(x).lower(lowering_platforms=("cuda",))
    (found,) = kernel_bodies.kernels_of(lowered.as_text())
    return found


def test_the_body_of_a_kernel_is_hashed_without_its_places():
    kernel = body(0, 2.0)
    assert kernel.digest == body(7, 2.0).digest != body(0, 3.0).digest
    assert kernel.name == "kernel" and "somewhere.py" not in kernel.text()
