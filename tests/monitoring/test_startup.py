"""The parts of a start add up to the time that went by."""

import subprocess
import sys
import time

import pytest

from jaxpar.monitoring import goodput


def test_parts_add_up(monkeypatch):
    clock = iter([10.0, 12.5, 13.0, 17.0])
    monkeypatch.setattr(goodput, "process_age", lambda: 3.0)
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: next(clock))
    run = goodput.StartUp()
    for part in ("data", "weights", "data"):
        run.ended(part)
    assert run.seconds == {"python and devices": 3.0, "data": 2.5 + 4.0, "weights": 0.5}
    assert str(run) == (
        "first step done after 10.0 s: python and devices 3.0, data 6.5, weights 0.5"
    )


@pytest.mark.waits
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_a_process_knows_its_age():
    code = "import time; time.sleep(0.5); from jaxpar.monitoring import goodput; "
    code += "print(goodput.process_age())"
    began = time.perf_counter()
    age = float(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert 0.5 <= age <= time.perf_counter() - began + 0.02
