"""Train steps are lowered for thousands of GPUs without a device."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from jaxpar.prediction.hardware import GPUS
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.identity import identity
from jaxpar.tools.planning import compiling
from tests.tiny import TINY

pytestmark = pytest.mark.slow

H100 = GPUS["h100"]


def with_calls(work: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and the number of Python functions that were called for it."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        return work(), calls
    finally:
        sys.setprofile(None)


def abstract_mesh(cfg: Config) -> AbstractMesh:
    """The mesh, without devices."""
    device = AbstractDevice(H100.device_kind, H100.multiprocessors, "gpu")
    auto = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(axis_sizes(cfg.parallel), AXES, auto, abstract_device=device)


def on(devices: int, base: Config = TINY, **changes: Any) -> Config:
    """A config for so many devices, with a row for each."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    rows = {"train.global_batch_size": devices}
    return resolve(replace(base, **rows | {"parallel.data": -1} | named), devices)


def test_devices_do_not_matter_to_the_program_nor_their_number_to_the_work():
    few, many = on(8, parallel__tensor=2), on(512, parallel__tensor=2, parallel__replica=32)
    real = identity(compiling.lower(few, H100, make_mesh(few.parallel, jax.devices()[:8])))
    of_few, calls = with_calls(lambda: compiling.lower(few, H100, abstract_mesh(few)))
    of_many, more_calls = with_calls(lambda: compiling.lower(many, H100, abstract_mesh(many)))
    assert identity(of_few) == real != identity(of_many)
    assert len(identity(of_many)) < 1.3 * len(real)
    assert more_calls < 1.01 * calls


PARALLEL = ("pipeline", "replica", "data", "expert", "sequence", "tensor")


@pytest.mark.parametrize(
    "name, layers, mesh",
    [
        ("llama3_70b", 8, (1, 8, 64, 1, 1, 8)),
        ("llama3_70b", 8, (8, 1, 64, 1, 1, 8)),
        ("mixtral_8x7b", 2, (1, 8, 64, 8, 1, 1)),
    ],
)
def test_4096_gpus(name, layers, mesh):
    sizes = {f"parallel__{axis}": size for axis, size in zip(PARALLEL, mesh, strict=True)}
    more = {"model__num_layers": layers, "compute__attention_backend": "pallas_hopper"}
    pipeline = {"parallel__zero": 1, "parallel__num_microbatches": 8} if mesh[0] > 1 else {}
    cfg = on(4096, load_config(name), **sizes, **more, **pipeline)
    found = compiling.lower(cfg, H100, abstract_mesh(cfg))
    assert len(identity(found)) < 20 << 20
