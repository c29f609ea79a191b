"""The metrics of GPUs, from a driver that the tests describe."""

import queue

import pynvml
import pytest

from jaxpar.config import Config, replace
from jaxpar.config.metrics import METRICS
from jaxpar.monitoring import gpus
from jaxpar.monitoring.gpus import GpuReader, open_gpus
from tests import fake_nvml
from tests.fake_nvml import NOT_SUPPORTED, FakeNvml
from tests.ranks import HANG

pytestmark = pytest.mark.waits


class TwoGpus(FakeNvml):
    """GPU 0 draws 300 W by its counter of energy, GPU 1 500 W.

    lacks     what they do not tell. seconds   the time by their counters.
    """

    def __init__(self, **lacks):
        def gpu(index: int):
            return {
                **fake_nvml.named(f"0000:{index}0:00.0", f"GPU-{'ab'[index]}"),
                "TotalEnergyConsumption": lambda: (300, 500)[index] * 1000 * self.seconds,  # mJ
                "PowerUsage": (310, 510)[index] * 1000,
                "ClockInfo": {pynvml.NVML_CLOCK_SM: (1980, 1410)[index]},
                "Temperature": {pynvml.NVML_TEMPERATURE_GPU: (61, 70)[index]},
                **fake_nvml.memory(used_mib=(60 + index) * 1024 - 600),
                **lacks,
            }

        super().__init__([gpu(0), gpu(1)])
        self.seconds = 0.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gpus, "EVERY_MS", 10)


def latest(reader, nvml, seconds: float):
    """Let time pass for the GPUs, and wait for a reading after it."""
    nvml.seconds += seconds
    before = reader._latest
    for _ in range(2):
        nvml.waited.clear()
        assert nvml.waited.wait(HANG)
    assert reader._latest is not before


def test_power_energy_clocks_and_memory(monkeypatch):
    nvml = TwoGpus()
    monkeypatch.setattr(gpus.time, "monotonic", lambda: nvml.seconds)
    with nvml.installed(), GpuReader(["GPU-a", "1"], pytest.fail) as reader:
        latest(reader, nvml, 4.0)
        found = reader.metrics(tokens_per_second=100.0)
        assert found == {
            "gpu_watts": 400.0,  # by energy, not the power of this moment
            "gpu_clock_mhz": 1410.0,
            "gpu_memory_gib": 61.0,
            "gpu_celsius": 70.0,
            "joules_per_token": 8.0,
            "xid_errors": 0.0,
        }
        assert found.keys() <= METRICS.keys()
        latest(reader, nvml, 2.0)
        assert "joules_per_token" not in reader.metrics(None)
    assert nvml.opened == 0


def test_a_gpu_that_does_not_tell_everything():
    """Without an energy counter, the power is that of the latest reading."""
    lacks = ("TotalEnergyConsumption", "Temperature", "no events")
    nvml = TwoGpus(**dict.fromkeys(lacks, NOT_SUPPORTED))
    with nvml.installed(), GpuReader(["0", "1"], pytest.fail) as reader:
        found = reader.metrics(200.0)
    assert found["gpu_watts"] == 410.0 and found["joules_per_token"] == 4.1
    assert "gpu_celsius" not in found and "xid_errors" not in found


def test_an_xid_error_is_counted_and_logged():
    nvml, said = TwoGpus(), queue.Queue()
    nvml.xids.put((1, 79))
    with nvml.installed(), GpuReader(["0", "1"], said.put) as reader:
        line = said.get(timeout=HANG)
        assert line == "WARNING    GPU-b reports Xid 79, an error of GPU or driver"
        assert reader.metrics(None)["xid_errors"] == 1.0


@pytest.mark.parametrize(
    ("nvml", "ids", "reason"),
    [
        (FakeNvml(start=fake_nvml.NO_DRIVER), ["0"], "NVML does not start: Driver Not Loaded"),
        (TwoGpus(), ["0", "GPU-c"], "GPU GPU-c: Not Found"),
    ],
)
def test_without_a_driver_or_a_gpu_there_is_one_line(nvml, ids, reason, monkeypatch):
    monkeypatch.setattr(gpus.visible, "gpu_is_present", lambda: True)
    monkeypatch.setattr(gpus.visible, "visible_gpu_ids", lambda: ids)
    said: list[str] = []
    with nvml.installed():
        assert open_gpus(Config(), said.append) is None
        assert said == [f"no power, clocks and errors of GPUs in the metrics: {reason}"]
        assert nvml.opened == 0
        off = replace(Config(), **{"metrics.gpus": False})
        assert open_gpus(off, pytest.fail) is None


def test_an_event_has_the_fields_of_the_real_one():
    fields = [name for name, _ in pynvml.c_nvmlEventData_t._fields_]
    assert {"device", "eventType", "eventData"} <= set(fields)
