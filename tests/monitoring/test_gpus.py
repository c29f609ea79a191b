"""The metrics of GPUs, from an NVML with the names, arguments and errors of the real one."""

import contextlib
import inspect
import queue
import sys
import threading
import types

import pytest

from jaxpar.config import Config, replace
from jaxpar.monitoring import gpus
from jaxpar.monitoring.gpus import GpuReader, open_gpus
from jaxpar.monitoring.metric_names import METRICS
from tests.ranks import HANG

pytestmark = pytest.mark.waits


class FakeNvml(types.ModuleType):
    """Two GPUs: the functions of `pynvml` that the reader calls. GPU 0 draws 300 W, GPU 1 500 W."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_DRIVER_NOT_LOADED = 3, 10, 9
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self, lacks=(), driver=True):
        super().__init__("pynvml")
        self.lacks, self.driver, self.opened, self.seconds = lacks, driver, 0, 0.0
        self.xids: queue.Queue = queue.Queue()
        self.waited = threading.Event()

    def _check(self, name):
        if name in self.lacks:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError(self.NVML_ERROR_DRIVER_NOT_LOADED)
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        assert isinstance(index, int)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-a": 0, "GPU-b": 1}[uuid]

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{'ab'[handle]}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._check("energy")
        return int((300, 500)[handle] * 1000 * self.seconds)  # mJ

    def nvmlDeviceGetPowerUsage(self, handle):
        return (310, 510)[handle] * 1000  # mW

    def nvmlDeviceGetClockInfo(self, handle, type):
        assert type == self.NVML_CLOCK_SM
        return (1980, 1410)[handle]

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        return types.SimpleNamespace(total=80 << 30, free=0, used=(60 + handle) << 30)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._check("temperature")
        return (61, 70)[handle]

    def nvmlEventSetCreate(self):
        self._check("events")
        return []

    def nvmlDeviceRegisterEvents(self, handle, eventTypes, eventSet):
        assert eventTypes == self.nvmlEventTypeXidCriticalError
        eventSet.append(handle)

    def nvmlEventSetWait_v2(self, eventSet, timeoutms):
        assert eventSet == [0, 1]
        with contextlib.suppress(queue.Empty):
            device, xid = self.xids.get(timeout=timeoutms / 1e3)
            return types.SimpleNamespace(device=device, eventType=8, eventData=xid)
        self.waited.set()
        raise self.NVMLError(self.NVML_ERROR_TIMEOUT)

    def nvmlEventSetFree(self, eventSet):
        eventSet.clear()


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
    nvml = FakeNvml()
    monkeypatch.setattr(gpus.time, "monotonic", lambda: nvml.seconds)
    with GpuReader(nvml, ["GPU-a", "1"], pytest.fail) as reader:
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
    nvml = FakeNvml(lacks=("energy", "temperature", "events"))
    with GpuReader(nvml, ["0", "1"], pytest.fail) as reader:
        found = reader.metrics(200.0)
    assert found["gpu_watts"] == 410.0 and found["joules_per_token"] == 4.1
    assert "gpu_celsius" not in found and "xid_errors" not in found


def test_an_xid_error_is_counted_and_logged():
    nvml, said = FakeNvml(), queue.Queue()
    nvml.xids.put((1, 79))
    with GpuReader(nvml, ["0", "1"], said.put) as reader:
        line = said.get(timeout=HANG)
        assert line == "WARNING    GPU-b reports Xid 79, an error of GPU or driver"
        assert reader.metrics(None)["xid_errors"] == 1.0


@pytest.mark.parametrize("present", [True, False])
def test_without_a_package_or_a_driver_there_is_one_line(present, monkeypatch):
    monkeypatch.setattr(gpus.visible, "gpu_is_present", lambda: True)
    monkeypatch.setattr(gpus.visible, "visible_gpu_ids", lambda: ["0"])
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False) if present else None)
    said: list[str] = []
    assert open_gpus(Config(), said.append) is None
    assert said == [
        "no power, clocks and errors of GPUs in the metrics: "
        + ("NVML: error 9" if present else "pip install nvidia-ml-py")
    ]
    off = replace(Config(), **{"metrics.gpus": False})
    assert open_gpus(off, pytest.fail) is None


def test_the_fake_has_the_shape_of_the_real_one():
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    fake = FakeNvml()
    for name in (n for n in dir(FakeNvml) if n.startswith(("nvml", "NVML"))):
        mine, theirs = getattr(fake, name), getattr(real, name)
        if inspect.isfunction(theirs):
            given = list(inspect.signature(mine).parameters)
            assert len(given) == len(inspect.signature(theirs).parameters), name
        elif isinstance(mine, int):
            assert mine == theirs, name
    assert issubclass(real.NVMLError, Exception)
    assert real.NVMLError(real.NVML_ERROR_TIMEOUT).value == real.NVML_ERROR_TIMEOUT
    fields = [name for name, _ in real.c_nvmlEventData_t._fields_]
    assert {"device", "eventType", "eventData"} <= set(fields)
