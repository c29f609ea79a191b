"""What a card of bench train says of the GPUs' power, with a program in nvidia-smi's place."""

import json
import os
import stat
import sys
import time

import pytest

from jaxpar.bench.training import power

#: Prints what nvidia-smi 580 prints for two GPUs, again and again, until it is ended.
PROGRAM = """#!{python}
import datetime, json, sys, time
json.dump(sys.argv[1:], open({asked!r}, "w"))
while True:
    now = datetime.datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    print(f"{{now}}, 2, 690.50, 1410, 0x0000000000000004, 61")
    print(f"{{now}}, 10, 610.50, [N/A], 0x0000000000000000, 66", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """(text) -> a program of that text is nvidia-smi from here on."""

    def put(text: str) -> None:
        file = tmp_path / "bin" / "nvidia-smi"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(file.parent), prepend=os.pathsep)

    return put


def watched(seconds: float, warm_up: float = 0.0) -> dict:
    """The card's entry of so many seconds."""
    with power.watch_power(True) as watch:
        time.sleep(warm_up)
        watch.begin()
        time.sleep(seconds)
    return watch.card()


def test_means_of_all_gpus_and_of_each(install, tmp_path, monkeypatch):
    asked = tmp_path / "asked.json"
    install(PROGRAM.format(python=sys.executable, asked=str(asked)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,10")
    found = watched(1.0, warm_up=1.0)["power"]
    assert 2 < found.pop("samples") <= 20  # those of the warm-up are left out
    each = found.pop("gpus")
    assert each == {
        "2": {"watts": 690.5, "sm_mhz": 1410, "at_power_limit": 1, "celsius": 61},
        "10": {"watts": 610.5, "sm_mhz": None, "at_power_limit": 0, "celsius": 66},
    }
    assert found == {"watts": 650.5, "sm_mhz": 1410, "at_power_limit": 0.5, "celsius": 66}
    query = f"--query-gpu={','.join(power.FIELDS)}"
    wanted = [query, "--format=csv,noheader,nounits", "--id", "2,10", "--loop-ms=250"]
    assert json.loads(asked.read_text()) == wanted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#!/bin/sh\necho 'Field \"x\" is not a valid field'\nexit 2\n", 'Field "x" is not a'),
        ("#!/bin/sh\nexec sleep 60\n", "no samples"),
        ("#!/bin/sh\necho '2026/11/22 10:00:00.000, 0, 69'\n", "2026/11/22 10:00:00.000, 0, 69"),
    ],
)
def test_nothing_seen_and_why(install, text, reason):
    install(text)
    found = watched(0.3)
    assert found["power"] is None and found["power_missing"].startswith(reason)


def test_without_nvidia_smi_or_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert watched(0.0) == {"power": None, "power_missing": "nvidia-smi is not installed"}
    with power.watch_power(False) as watch:
        watch.begin()
    assert watch.card() == {"power": None, "power_missing": "no GPU"}


def test_one_that_does_not_end_is_killed(install, monkeypatch):
    monkeypatch.setattr(power, "PATIENCE", 0.2)
    install("#!/bin/sh\ntrap '' TERM\nwhile true; do sleep 0.05; done\n")
    began = time.monotonic()
    assert watched(0.3)["power"] is None
    assert time.monotonic() - began < 5


def test_in_words():
    means = {"watts": 690.4, "sm_mhz": 1411.6, "at_power_limit": 0.975, "celsius": 61}
    said = power.in_words({"power": means})
    assert said == "GPUs: 690 W, 1,412 MHz, 98% of the time at the power limit"
    assert power.in_words({"power": None}) == power.in_words({}) == ""
    assert power.in_words({"power": means | {"sm_mhz": None}}) == ""
