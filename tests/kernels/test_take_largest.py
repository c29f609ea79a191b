"""The largest elements of groups: the kernel (interpreted, and compiled for GPUs) and XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.kernels import take_largest as module
from jaxpar.kernels.platform import Platform, compiling_for
from jaxpar.kernels.take_largest import by_kernel, by_xla, take_largest
from jaxpar.prediction.hardware import GPUS
from jaxpar.tools.planning.compiling import target_config
from tests.kernels.test_triton_lowering import GPU, calls, lowered, needs_triton, on
from tests.kernels.triton_sources import TARGET
from tests.slow import slow

#: Rows and columns of a group, groups, and elements to take of each.
SHAPES = [(4, 16, 3, 5), slow(1, 64, 2, 10), slow(2, 32, 1, 64), slow(1, 1, 5, 1)]


def plain(x: np.ndarray, columns: int, k: int) -> tuple[list[set[int]], np.ndarray]:
    """The places that are taken out of each group, of a stable sort, and the others."""
    found, rest = [], x.copy()
    for begin in range(0, x.shape[1], columns):
        group = rest[:, begin : begin + columns].ravel()
        places = np.argsort(-np.abs(group), kind="stable")[:k]
        group[places] = 0
        rest[:, begin : begin + columns] = group.reshape(-1, columns)
        found.append(set(places.tolist()))
    return found, rest


def assert_taken(x: np.ndarray, columns: int, k: int, taken) -> None:
    """Values are those of the places, and places and rest those of `plain`."""
    values, places, rest = map(np.asarray, taken)
    wanted, left = plain(x, columns, k)
    assert (values.dtype, places.dtype, rest.dtype) == (np.float32, np.int32, np.float32)
    assert [set(row.tolist()) for row in places] == wanted
    begins = columns * np.arange(len(wanted))[:, None]
    np.testing.assert_array_equal(values, x[places // columns, begins + places % columns])
    np.testing.assert_array_equal(rest, left)


def draw(rows: int, columns: int, ties: bool) -> np.ndarray:
    x = np.random.default_rng(columns).standard_normal((rows, columns)).astype(np.float32)
    return np.round(x) if ties else x


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("rows", "columns", "groups", "k"), SHAPES)
def test_takes_the_largest_of_every_group(rows, columns, groups, k, ties):
    x = draw(rows, groups * columns, ties)
    for by in (by_xla, functools.partial(by_kernel, interpret=True)):
        assert_taken(x, columns, k, by(jnp.asarray(x), columns, k))


def test_takes_what_is_not_finite():
    x = draw(4, 48, ties=False)
    x[3, 0], x[2, 17], x[0, 40] = np.nan, -np.inf, np.inf
    for by in (by_xla, functools.partial(by_kernel, interpret=True)):
        values, _, rest = by(jnp.asarray(x), 16, 5)
        assert np.isnan(values[0]).sum() == 1
        assert np.isneginf(values[1]).sum() == np.isposinf(values[2]).sum() == 1
        assert np.isfinite(rest).all()


@pytest.mark.parametrize(("kind", "kernels"), [("9.0", 1), ("7.5", 0)])
def test_where_the_kernel_runs(kind, kernels):
    """Under `shard_map` as well: results vary over the axes that x does."""
    mesh, x = on("9.0", (2,), ("data",)), jax.ShapeDtypeStruct((64, 1 << 8), jnp.float32)

    def local(x):
        taken = take_largest(x, 32, 10)
        assert all(jax.typeof(a).manual_axis_type == jax.typeof(x).manual_axis_type for a in taken)
        return taken

    over = PartitionSpec("data")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=over, out_specs=over, check_vma=True)
    with compiling_for(Platform("gpu", GPU["9.0"], kind)):
        assert calls(lowered(mesh, mapped, x)) == kernels


@pytest.mark.parametrize(
    ("capability", "rows", "columns", "why"),
    [
        ("9.0", 256, 32, None),
        ("7.5", 256, 32, "it needs an NVIDIA GPU since Ampere"),
        ("9.0", 1, 32, "an array of one row is small"),
        ("9.0", 96, 32, "rows and columns must be powers of two"),
        ("9.0", 1024, 32, "groups have 32,768 elements, and it takes at most 16,384"),
    ],
)
def test_refusals(capability, rows, columns, why):
    with compiling_for(Platform("gpu", GPU["9.0"], capability)):
        assert module.refusal(rows, columns) == why
    assert module.refusal(256, 32) == "it needs an NVIDIA GPU since Ampere"  # on a CPU


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", ["a100", "h200", "b200"])
def test_compiles(name, kernel, monkeypatch):
    """Without the kernel, XLA's own takes up to 16 elements, and nothing is sorted."""
    gpu = GPUS[name]
    monkeypatch.setattr(module, "MAX_GROUP", module.MAX_GROUP * kernel)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("x",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, PartitionSpec())
    for rows, k in ((32, 10), (256, 8), (512, 16)):
        x = jax.ShapeDtypeStruct((rows, 1 << 12), jnp.float32, sharding=here)
        run = jax.jit(functools.partial(take_largest, columns=32, k=k))
        with (
            jax.set_mesh(mesh),
            compiling_for(Platform("gpu", gpu.device_kind, gpu.compute_capability)),
        ):
            text = run.lower(x).compile().as_text()
        assert (TARGET if kernel else "__gpu$TopK") in text
        assert " sort(" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("rows", "columns", "k"), [(32, 32, 10), (256, 32, 82), (512, 32, 16)])
def test_on_a_gpu(rows, columns, k, ties):
    """XLA's kernel takes any of equal magnitudes."""
    x = draw(rows, 1 << 12, ties)
    for by in (by_kernel,) if ties else (by_kernel, by_xla):
        taken = jax.jit(by, static_argnums=(1, 2))(jnp.asarray(x), columns, k)
        assert_taken(x, columns, k, taken)
