"""Every process makes the same program: sets of names must not decide an order.

Python orders a set of strings anew in each process. A program in which that shows is never found in
the compilation cache, and processes of one run would compile different ones.
"""

import contextlib
import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

from jaxpar.certification import traces
from jaxpar.certification.meshes import num_devices, parse_meshes
from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.model import feed_forward
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.identity import identity
from jaxpar.step.state import abstract_state, state_shardings
from jaxpar.step.train_step import make_train_step
from tests.tiny import TINY

ROOT = Path(__file__).resolve().parents[2]

#: Prints the hash of a step, as a process of its own.
LOWER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
from tests.step.test_same_program import hashes_of
print(*hashes_of(sys.argv[1]))
if sys.argv[2:]:
    from tests.step.test_same_program import forgetting
    with forgetting():
        print(*hashes_of(sys.argv[1]))
"""


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """JAX forgets what it has traced, in the middle of the trace of a step."""
    calls, shards = itertools.count(1), feed_forward.gate_up

    def gate_up(*args: Any) -> Any:
        if next(calls) == 2:
            jax.clear_caches()
        return shards(*args)

    with mock.patch.object(feed_forward, "gate_up", gate_up):
        yield
    assert next(calls) > 2


def hashes_of(item: str) -> tuple[str, str]:
    """Hashes of the identity and of the text of a mesh's lowered train step."""
    parallel = parse_meshes([item], TINY.parallel)[item]
    n = num_devices(parallel)
    cfg, mesh = resolve(replace(TINY, parallel=parallel), n), make_mesh(parallel, jax.devices()[:n])
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    placed = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
    state = jax.tree.map(placed, abstract_state(cfg), state_shardings(cfg, mesh))
    step: Any = make_train_step(cfg, mesh)
    lowered = step.lower(state, batch)
    content = identity(lowered), lowered.as_text().encode()
    return hashlib.sha256(content[0]).hexdigest(), hashlib.sha256(content[1]).hexdigest()


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize(
    "item",
    [
        "pipeline=2,sequence=2,num_microbatches=2,layer_loop=scan",
        "pipeline=2,data=2,sequence=2,tensor=2,num_microbatches=2,layer_loop=unroll",
        "replica=2,data=4,tensor=2,layer_loop=unroll",
    ],
)
def test_another_process_lowers_the_same_step(item):
    """Even where its text differs, since JAX has written equal inner functions twice."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOWER, item, *more],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            text=True,
            stdout=subprocess.PIPE,
        )
        for seed, *more in (("1",), ("2", "forgetting"))
    ]
    one, other = (process.communicate(timeout=600)[0].splitlines() for process in processes)
    (first,), (second, third) = one, other
    assert len(first) == 129 and first == second
    assert third.split()[0] == first.split()[0] and third.split()[1] != first.split()[1]


def lowered(fn: Any) -> jax.stages.Lowered:
    return jax.jit(fn, keep_unused=True).lower(1.0)


def test_a_program_is_known_by_what_it_does_and_not_by_where_it_is_written():
    one, same, other = lowered(lambda x: x + 1), lowered(lambda x: x + 1), lowered(lambda x: x + 2)
    assert identity(one) == identity(same) != identity(other)


def inner(number: int, name: str = "inner") -> Any:
    """A function that is compiled as one of its own within another, and calls another."""

    def added(x: jax.Array) -> jax.Array:
        return jax.jit(lambda y: y + number)(x) * 3

    added.__name__ = name
    return jax.jit(added)


def test_inner_functions_are_known_by_what_they_do():
    f, g, same_as_g = inner(1), inner(2), inner(2)
    shared = lowered(lambda x: f(x) + g(g(x)))
    split = lowered(lambda x: f(x) + g(same_as_g(x)))
    functions = [str(one.compiler_ir()).count("func.func") for one in (shared, split)]
    assert functions == [5, 7] and identity(shared) == identity(split)
    h = inner(2, "of_another_name")
    assert identity(lowered(lambda x: f(x) + h(h(x)))) == identity(shared)
    assert identity(lowered(lambda x: f(x) + g(f(x)))) != identity(shared)
    assert identity(lowered(lambda x: g(x) + f(f(x)))) != identity(shared)
    k = inner(3)  # differs in what its inner function calls
    assert identity(lowered(lambda x: f(x) + k(k(x)))) != identity(shared)
