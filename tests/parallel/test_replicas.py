"""Compressed sums over replicas: those of a plain program on whole arrays, on every mesh.

`tests/meshes/test_replicas.py` has the train step.
"""

import dataclasses
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import ParallelConfig
from jaxpar.monitoring.hlo import collective_bytes
from jaxpar.parallel.collectives import varying
from jaxpar.parallel.replicas import top_k
from jaxpar.parallel.replicas.reduction import (
    BLOCK,
    error_spec,
    feedback_specs,
    reduce_compressed,
    replica_dim,
    sent_bytes,
)
from jaxpar.sharding.axes import REPLICA
from jaxpar.sharding.initial_values import initialize
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import ParamSpec, abstract, flat, partition_specs
from tests.parallel import replicas_reference as plain
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile")

SPECS = {
    "embed": ParamSpec(shape=(48, 64), axes=("vocab", "embed")),
    "layers": {
        "wq": ParamSpec(
            shape=(2, 24, 4, 16), axes=("layer", "embed", "heads", "head_dim"), columns=2
        ),
        "w_down": ParamSpec(shape=(2, 32, 48), axes=("layer", "mlp", "embed"), columns=1),
        "bq": ParamSpec(shape=(2, 4, 8), axes=("layer", "heads", "head_dim"), decay=False),
    },
    "norm": ParamSpec(shape=(64,), axes=("norm",), decay=False),
}
MATRICES = ["embed", "layers/wq", "layers/w_down"]
MESHES = (
    "replica=2,data=2,tensor=2 replica=4,data=2,sequence=2 pipeline=2,replica=3,tensor=2".split()
)
STEPS, GROUP = 3, 128


def settings(mesh: str, method: str) -> ParallelConfig:
    (parallel,) = parse_meshes([mesh], ParallelConfig(data=1)).values()
    return dataclasses.replace(parallel, replica_reduction=method, replica_top_k=0.1)


def random_grads(replicas: int, step: int) -> dict[str, np.ndarray]:
    """Gradients of each replica, by name: [replicas, ...]."""
    rng = np.random.default_rng(step)
    of = flat(SPECS).items()
    return {n: rng.standard_normal((replicas, *s.shape)).astype(np.float32) for n, s in of}


def reduction(p: ParallelConfig, devices) -> Any:
    """Return a jitted function (gradients [.., replicas, ..], feedback) -> (sums, feedback)."""
    mesh = make_mesh(p, devices[: math.prod(axis_sizes(p))])
    stacked = {
        name: error_spec(spec, p.replica).partition_spec for name, spec in flat(SPECS).items()
    }
    kept = partition_specs(feedback_specs(SPECS, p))
    of = flat(partition_specs(SPECS))

    def local(grads, feedback):
        own = {}
        for name, spec in flat(SPECS).items():
            grad = jnp.squeeze(grads[name], replica_dim(spec))
            # Each device of an axis that repeats the parameter has the gradient of its own tokens.
            missing = [a for a in mesh.axis_names if a not in (*_named(of[name]), REPLICA)]
            own[name] = varying(grad) / math.prod(lax.axis_size(a) for a in missing)
        sums, feedback = reduce_compressed(_tree(own), feedback, SPECS, p)
        return flat(sums), feedback

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(stacked, kept), out_specs=(of, kept))
    return jax.jit(mapped)


def _named(spec) -> tuple[str, ...]:
    return tuple(itertools.chain(*(axes if isinstance(axes, tuple) else (axes,) for axes in spec)))


def _tree(arrays: dict) -> dict:
    layers = {n.removeprefix("layers/"): a for n, a in arrays.items() if "/" in n}
    return {n: a for n, a in arrays.items() if "/" not in n} | {"layers": layers}


def stacked(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    of = flat(SPECS)
    return {name: np.moveaxis(g, 0, replica_dim(of[name])) for name, g in grads.items()}


def errors_of(feedback: Any) -> dict[str, np.ndarray]:
    """Errors by name, [replicas, ...]."""
    of = flat(SPECS)
    return {
        name: np.moveaxis(np.asarray(a), replica_dim(of[name]), 0)
        for name, a in flat(feedback["errors"]).items()
    }


def boxes_of(spec: ParamSpec, p: ParallelConfig) -> list[tuple[slice, ...]]:
    """The parts of an array that devices have."""
    dims = []
    for size, axes in zip(spec.shape, spec.partition_spec, strict=True):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        part = size // math.prod(getattr(p, axis) for axis in axes)
        dims.append([slice(start, start + part) for start in range(0, size, part)])
    return list(itertools.product(*dims))


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of which small arrays have several, and incomplete ones."""
    monkeypatch.setattr(top_k, "MIN_GROUP", GROUP)
    monkeypatch.setattr(top_k, "MAX_GROUP", GROUP)


@pytest.mark.parametrize("method", ["int8", "top_k"])
@pytest.mark.parametrize("mesh", [MESHES[0], *map(slow, MESHES[1:])])
def test_sums_and_errors_are_those_of_whole_arrays(mesh, method, devices, small_groups):
    p = settings(mesh, method)
    reduce, specs = reduction(p, devices), flat(SPECS)
    feedback = initialize(feedback_specs(SPECS, p), 0)
    left = errors_of(feedback)
    assert sorted(left) == sorted(MATRICES)
    for step in range(STEPS):
        grads = random_grads(p.replica, step)
        sums, feedback = reduce(stacked(grads), feedback)
        found = errors_of(feedback)
        for name, grad in grads.items():
            wanted, spec = grad.sum(0), specs[name]
            if name in MATRICES:
                x = grad + left[name]
                if method == "int8":
                    wanted, left[name] = plain.int8(x, boxes_of(spec, p), BLOCK)
                else:
                    boxes = boxes_of(spec, p)
                    how = p.replica_top_k, GROUP, top_k.COLUMNS
                    wanted, left[name] = plain.top_k(x, boxes, *how)
                np.testing.assert_allclose(found[name], left[name], atol=1e-5, err_msg=name)
                np.testing.assert_allclose(
                    sums[name] + found[name].sum(0), x.sum(0), atol=2e-5, err_msg=name
                )
            np.testing.assert_allclose(sums[name], wanted, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", [slow(mesh) for mesh in MESHES])
def test_bfloat16_rounds_each_gradient_and_their_sum(mesh, devices):
    p = settings(mesh, "bfloat16")
    rounded = lambda a: np.asarray(a, jnp.bfloat16).astype(np.float32)  # noqa: E731
    grads = random_grads(p.replica, 0)
    sums, feedback = reduction(p, devices)(stacked(grads), ())
    assert feedback == ()
    for name, grad in grads.items():
        wanted = rounded(rounded(grad).sum(0)) if name in MATRICES else grad.sum(0)
        # A sum in another order may be rounded to the neighbor.
        np.testing.assert_allclose(sums[name], wanted, atol=1e-6, rtol=2**-7, err_msg=name)


def compiled_text(p: ParallelConfig, devices) -> str:
    specs = {name: error_spec(spec, p.replica) for name, spec in flat(SPECS).items()}
    kept = feedback_specs(SPECS, p)
    lowered = reduction(p, devices).lower(abstract(specs), abstract(kept) if kept else ())
    return lowered.compile().as_text()


@pytest.mark.parametrize(
    ("method", "dtypes"),
    [
        slow("int8", {"all-to-all": {"s8", "f32"}, "all-gather": {"s8", "f32"}}),
        ("bfloat16", {"all-to-all": {"u16"}, "all-gather": {"u16"}}),
        slow("top_k", {"all-gather": {"f32", "u16"}}),
    ],
)
def test_what_travels_is_what_is_said(method, dtypes, devices):
    p = settings("replica=4", method)
    text = compiled_text(p, devices)
    sent = collective_bytes(text)
    assert not sent.unknown
    assert sent.card()["bytes"] == pytest.approx(sent_bytes(SPECS, p), rel=1e-6)
    for kind, wanted in dtypes.items():
        types = " ".join(re.findall(rf"= (\S.*?) {kind}\(", text))
        assert set(re.findall(r"(\w+)\[", types)) == wanted, kind
    assert sent_bytes(SPECS, p) < 0.51 * sent_bytes(
        SPECS, dataclasses.replace(p, replica_reduction="float32")
    )
