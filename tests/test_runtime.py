"""Before JAX starts, and at a program's first run."""

import os

import jax
import pytest

from jaxpar import runtime, xla_flags
from jaxpar.config import ConfigError, RunConfig


@pytest.fixture
def gpu_host(monkeypatch):
    """A host with a GPU, as far as the flags can tell, and an environment of its own."""
    monkeypatch.setattr(xla_flags, "gpu_is_present", lambda: True)
    for name in ("XLA_FLAGS", *xla_flags.ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        yield


def test_flags_are_set_and_told(gpu_host):
    told = xla_flags.apply("auto")
    for flag in xla_flags.FLAGS:
        assert f"--{flag.name}={flag.value}" in told
        assert f"--{flag.name}={flag.value}" in os.environ["XLA_FLAGS"].split()
    for name, value in xla_flags.ENVIRONMENT.items():
        assert os.environ[name] == value and f"{name}={value}" in told
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


def test_the_users_own_win(gpu_host):
    mine = "--xla_gpu_enable_latency_hiding_scheduler=false"
    os.environ |= {"XLA_FLAGS": mine, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    told = xla_flags.apply("auto")
    assert os.environ["XLA_FLAGS"].split()[-1] == mine
    assert os.environ["XLA_FLAGS"].count("latency_hiding") == 1
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert not [item for item in told if "latency_hiding" in item or "MEM_FRACTION" in item]


def test_none_sets_nothing(gpu_host):
    before = dict(os.environ)
    assert xla_flags.apply("none") == []
    assert os.environ == before


def test_without_a_gpu_nothing_is_set(monkeypatch):
    monkeypatch.setattr(xla_flags, "gpu_is_present", lambda: False)
    assert xla_flags.apply("auto") == []


def test_too_late_to_simulate_devices(devices):
    assert runtime.start(RunConfig(cpu_devices=len(devices))) == []  # as many as there are
    with pytest.raises(ConfigError, match="comes too late: JAX has started with 16 devices"):
        runtime.start(RunConfig(cpu_devices=3))
    assert jax.device_count() == 16


def test_only_the_first_run_is_waited_for(monkeypatch):
    events = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: events.append(("wait", x)) or x)

    def program(a, b):
        events.append(("run", (a, b)))
        return a + b

    step = runtime.FirstRunAlone(program)
    assert [step(1, 2), step(3, 4)] == [3, 7]
    assert events == [("wait", (1, 2)), ("run", (1, 2)), ("wait", 3), ("run", (3, 4))]
