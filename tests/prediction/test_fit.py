"""A run that does not fit in memory is refused before anything is allocated or written."""

from types import SimpleNamespace

import jax
import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import read_config
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from jaxpar.prediction import startup
from jaxpar.prediction.memory import memory_of
from jaxpar.training import first_run, start

GIB = 1 << 30


def test_llama3_8b_on_a_host_of_24_gib_without_a_gpu():
    cfg = resolve(load_config("llama3_8b"), 1)
    with pytest.raises(ConfigError) as caught:
        startup.check_host(cfg, 1, 24 * GIB)
    said = str(caught.value)
    assert said.startswith("model = '8,030,261,248 parameters': needs ")
    assert "GiB of memory for 1 CPU device (weights 29.9, optimizer 59.8, " in said
    assert "but this host or container has 24.0 GiB. Fix: train on GPUs" in said


def test_what_fits_is_not_refused():
    cfg = resolve(load_config("quickstart"), 1)
    needed = int(memory_of(cfg, on_reference=True).total)
    startup.check_host(cfg, 1, needed)
    with pytest.raises(ConfigError, match=r"needs .* for 2 CPU devices"):
        startup.check_host(cfg, 2, 2 * needed - 1)


def test_a_step_that_is_too_large_for_a_small_model():
    cfg = resolve(replace(load_config("quickstart"), **{"train.global_batch_size": 1 << 20}), 1)
    with pytest.raises(ConfigError, match=r"Fix: take smaller steps, with a smaller --train\.glob"):
        startup.check_host(cfg, 1, 24 * GIB)


def test_all_devices_and_processes_of_a_host_count(devices, monkeypatch):
    asked = []
    monkeypatch.setattr(
        startup, "check_host", lambda cfg, count, there: asked.append((count, there))
    )
    monkeypatch.setattr(startup, "host_memory", lambda: 7)
    assert startup.check_fits(Config(), processes=2) == ""
    assert asked == [(2 * jax.local_device_count(), 7)]


def test_a_gpu_gets_a_warning(monkeypatch):
    cfg = resolve(load_config("llama3_8b"), 8)
    limit = memory_of(cfg).total
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(jax, "local_device_count", lambda: 8)
    stats = {"bytes_limit": int(limit)}
    assert startup.check_fits(cfg) == "" or limit > int(limit)
    stats = {"bytes_limit": int(limit / 2)}
    assert "GiB, but a device (NVIDIA H200) has" in startup.check_fits(cfg)
    stats = None
    assert startup.check_fits(cfg) == ""


def test_train_refuses_it_and_writes_nothing(devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(startup, "host_memory", lambda: 1 << 20)
    cfg = read_config(["quickstart"])
    for work in (first_run.prepare_quickstart, start.checked):
        with pytest.raises(ConfigError, match=r"but this host or container has 0\.0 GiB"):
            work(cfg)
    assert list(tmp_path.iterdir()) == []
