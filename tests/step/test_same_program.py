"""Every process makes the same program: sets of names must not decide an order.

Python orders a set of strings anew in each process. A program in which that shows is never found in
the compilation cache, and processes of one run would compile different ones.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.compiled import identity
from jaxpar.step.state import abstract_state, state_shardings
from jaxpar.step.train_step import make_train_step
from jaxpar.verification import traces
from jaxpar.verification.meshes import num_devices, parse_meshes
from tests.slow import slow
from tests.tiny import TINY

ROOT = Path(__file__).resolve().parents[2]

#: Prints the hash of a step, as a process of its own.
LOWER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
from tests.step.test_same_program import hash_of
print(hash_of(sys.argv[1]))
"""


def hash_of(item: str) -> str:
    """Of a mesh's lowered train step."""
    parallel = parse_meshes([item], TINY.parallel)[item]
    n = num_devices(parallel)
    cfg, mesh = resolve(replace(TINY, parallel=parallel), n), make_mesh(parallel, jax.devices()[:n])
    batch = traces.place_batch(traces.random_batch(cfg), cfg, mesh)
    placed = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
    state = jax.tree.map(placed, abstract_state(cfg), state_shardings(cfg, mesh))
    step: Any = make_train_step(cfg, mesh)
    return hashlib.sha256(identity(step.lower(state, batch))).hexdigest()


@pytest.mark.parametrize(
    "item",
    [
        "pipeline=2,data=2,sequence=2,tensor=2,num_microbatches=2,layer_loop=unroll",
        slow("replica=2,data=4,tensor=2,layer_loop=unroll"),
    ],
)
def test_another_process_lowers_the_same_step(item):
    """Both are new: what a process has traced before decides which inner functions JAX shares."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOWER, item],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            text=True,
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate(timeout=300)[0].strip() for process in processes)
    assert len(one) == 64 and one == other


def test_a_program_is_known_by_what_it_does_and_not_by_where_it_is_written():
    one = jax.jit(lambda x: x + 1, keep_unused=True)
    same = jax.jit(lambda x: x + 1, keep_unused=True)
    other = jax.jit(lambda x: x + 2, keep_unused=True)
    first, second, third = (identity(f.lower(1.0)) for f in (one, same, other))
    assert first == second != third
