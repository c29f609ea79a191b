"""The compilation cache of the environment: off where jaxlib reads programs back wrongly."""

from types import SimpleNamespace

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
