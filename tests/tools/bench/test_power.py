"""What a card of profile --bench says of the GPUs' power, with a driver that the tests describe."""

import threading

import pynvml
import pytest

from jaxpar.tools.bench import conditions
from tests import fake_nvml
from tests.fake_nvml import FakeNvml, h200, h200s
from tests.ranks import wait_for

pytestmark = pytest.mark.waits


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(conditions, "EVERY", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def working(index: int, watts: float, mhz: int, reasons: int, celsius: int):
    """A GPU under load. Args:     mhz: 0 if it does not tell its clock."""
    clock = {pynvml.NVML_CLOCK_SM: mhz} if mhz else fake_nvml.NOT_SUPPORTED
    heat = {pynvml.NVML_TEMPERATURE_GPU: celsius}
    more = {"CurrentClocksEventReasons": reasons, "Temperature": heat, "ClockInfo": clock}
    return h200(index, PowerUsage=round(watts * 1000), **more)


def watched(nvml: FakeNvml, samples: int = 0) -> conditions.Watch:
    """What was seen after so many samples, before and after the warm-up."""
    with nvml.installed(), conditions.watch_power(True) as watch:
        wait_for(lambda: watch.missing or len(watch.samples) >= samples)
        watch.begin()
        wait_for(lambda: watch.missing or len(watch.samples) >= samples)
    assert nvml.opened == 0
    return watch


def test_means_of_all_gpus_and_of_each(monkeypatch):
    gpus = h200s() + [h200(index) for index in (8, 9)]
    gpus[2], at = working(2, 690.5, 1410, 0x04, 61), len(gpus)
    gpus.append(working(at, 610.5, 0, 0, 66))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,10")
    watch = watched(FakeNvml(gpus), samples=10)
    assert {sample.index for sample in watch.samples} == {2, 10}
    found = watch.card()["power"]
    assert 5 <= found.pop("samples") == len(watch.samples) // 2
    each = found.pop("gpus")
    assert list(each) == ["2", "10"]
    assert each == {
        "2": {"watts": 690.5, "sm_mhz": 1410, "at_power_limit": 1, "celsius": 61},
        "10": {"watts": 610.5, "sm_mhz": None, "at_power_limit": 0, "celsius": 66},
    }
    assert found == {"watts": 650.5, "sm_mhz": 1410, "at_power_limit": 0.5, "celsius": 66}


def test_samples_of_the_warm_up_are_left_out():
    gpu = working(0, 100.0, 345, 0, 30)
    with FakeNvml([gpu]).installed(), conditions.watch_power(True) as watch:
        wait_for(lambda: watch.samples)
        gpu["PowerUsage"] = 700_000
        wait_for(lambda: watch.samples[-1].power_draw == 700)
        watch.begin()
        wait_for(lambda: watch.samples)
    assert watch.card()["power"]["watts"] == 700


def test_gpus_and_parts_of_them_by_uuid(monkeypatch):
    gpus = h200s()
    gpus[5]["parts"] = ["MIG-x"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{gpus[3]['UUID']},MIG-x")
    assert list(watched(FakeNvml(gpus), samples=2).card()["power"]["gpus"]) == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-other")
    found = watched(FakeNvml(gpus)).card()
    assert found == {"power": None, "power_missing": "GPU GPU-other: Not Found"}


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (FakeNvml(start=fake_nvml.NO_DRIVER), "NVML does not start: Driver Not Loaded"),
        (FakeNvml(start=fake_nvml.NO_LIBRARY), "there is no NVIDIA driver: its library"),
        (FakeNvml([h200(0), h200(1, PowerUsage=fake_nvml.LOST)]), "GPU 1: GPU is lost"),
    ],
)
def test_nothing_seen_and_why(nvml, reason):
    found = watched(nvml).card()
    assert found["power"] is None and found["power_missing"].startswith(reason)


def test_without_a_gpu():
    with conditions.watch_power(False) as watch:
        watch.begin()
    assert watch.card() == {"power": None, "power_missing": "no GPU"}


def test_a_driver_that_does_not_respond_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(conditions, "PATIENCE", 0.05)
    asked, answer = threading.Event(), threading.Event()

    def stuck() -> int:
        asked.set()
        answer.wait()
        return 0

    with FakeNvml([h200(0, PowerUsage=stuck)]).installed():
        with conditions.watch_power(True) as watch:
            assert asked.wait(10)
        assert watch.card() == {"power": None, "power_missing": "no samples"}
        (thread,) = [t for t in threading.enumerate() if t.name == "power"]
        answer.set()
        thread.join()


def test_in_words():
    means = {"watts": 690.4, "sm_mhz": 1411.6, "at_power_limit": 0.975, "celsius": 61}
    said = conditions.power_in_words({"power": means})
    assert said == "GPUs: 690 W, 1,412 MHz, 98% of the time at the power limit"
    assert conditions.power_in_words({"power": None}) == conditions.power_in_words({}) == ""
    assert conditions.power_in_words({"power": means | {"sm_mhz": None}}) == ""


def test_a_card_has_the_line_of_earlier_cards_about_the_first_gpu():
    with FakeNvml(h200s()).installed():
        assert conditions.gpu_facts() == "NVIDIA H200, 580.95.05, 700.00 W"
    with FakeNvml(h200s(PowerManagementLimit=fake_nvml.NOT_SUPPORTED)).installed():
        assert conditions.gpu_facts() == "NVIDIA H200, 580.95.05, [N/A]"
    with FakeNvml(start=fake_nvml.NO_LIBRARY).installed():
        assert conditions.gpu_facts() == ""
