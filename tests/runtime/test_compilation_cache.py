"""The compilation cache of the environment: off where jaxlib reads programs back wrongly."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import Config, replace
from jaxpar.runtime import start
from jaxpar.runtime.gpus import visible, xla_flags


@pytest.mark.parametrize(
    ("processes", "devices", "folder", "off"),
    [(1, 2, "/xla", True), (2, 1, "/xla", True), (1, 1, "/xla", False), (2, 2, "", False)],
)
def test_programs_of_several_cpu_devices_are_not_read_from_a_cache(
    processes, devices, folder, off, monkeypatch
):
    updates = {}
    config = SimpleNamespace(
        jax_num_cpu_devices=devices, jax_platforms="cpu", update=updates.__setitem__
    )
    monkeypatch.setattr(start.jax, "config", config)
    monkeypatch.setattr(start, "_simulate", lambda devices: None)
    monkeypatch.setattr(visible, "gpu_is_present", lambda: False)
    monkeypatch.setattr(xla_flags, "gpu_is_present", lambda: False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
    for cfg in (Config(), replace(Config(), **{"run.cpu_devices": devices})):
        updates.clear()
        told = start.start(cfg, processes)
        assert updates == ({"jax_enable_compilation_cache": False} if off else {})
        assert len(told) == off


@pytest.mark.parametrize("added", [1.0, 2.0])
def test_programs_that_call_python_are_not_taken_for_each_other(added):
    """tests/kept_programs.py keeps programs by their text, which does not have the functions."""
    like = jax.ShapeDtypeStruct((), jnp.float32)
    add = lambda x: np.float32(x + np.float32(added))  # noqa: E731
    assert jax.jit(lambda x: jax.pure_callback(add, like, x))(jnp.float32(0)) == added
