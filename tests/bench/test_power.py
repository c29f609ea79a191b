"""What a card of profile --bench says of the GPUs' power, with a program in nvidia-smi's place."""

import json
import os
import stat
import sys
import tempfile

import pytest

from jaxpar.bench.training import power
from tests.ranks import wait_for

pytestmark = pytest.mark.waits

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


def watched(monkeypatch, lines: int = 0) -> power.Watch:
    """What was seen once nvidia-smi has written so many lines, before and after the warm-up."""
    kept = []
    make = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda mode: kept.append(make(mode)) or kept[0])
    written = lambda: os.pread(kept[0].fileno(), 1 << 20, 0).count(b"\n")  # noqa: E731
    with power.watch_power(True) as watch:
        wait_for(lambda: not kept or written() >= lines)
        watch.begin()
        if kept:
            before = written()
            wait_for(lambda: written() >= before + (lines > 1) * lines)
    return watch


def test_means_of_all_gpus_and_of_each(install, tmp_path, monkeypatch):
    asked = tmp_path / "asked.json"
    install(PROGRAM.format(python=sys.executable, asked=str(asked)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,10")
    watch = watched(monkeypatch, lines=10)
    found = watch.card()["power"]
    # Those of the warm-up are left out.
    assert 2 < found.pop("samples") <= watch.text.count("\n") // 2 - 4
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
def test_nothing_seen_and_why(install, text, reason, monkeypatch):
    install(text)
    found = watched(monkeypatch, lines="echo" in text).card()
    assert found["power"] is None and found["power_missing"].startswith(reason)


def test_without_nvidia_smi_or_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert watched(monkeypatch).card() == {
        "power": None,
        "power_missing": "nvidia-smi is not installed",
    }
    with power.watch_power(False) as watch:
        watch.begin()
    assert watch.card() == {"power": None, "power_missing": "no GPU"}


def test_one_that_does_not_end_is_killed(install, monkeypatch):
    monkeypatch.setattr(power, "PATIENCE", 0.2)
    install("#!/bin/sh\ntrap '' TERM\necho\nwhile true; do sleep 0.05; done\n")
    assert watched(monkeypatch, lines=1).card()["power"] is None


def test_in_words():
    means = {"watts": 690.4, "sm_mhz": 1411.6, "at_power_limit": 0.975, "celsius": 61}
    said = power.in_words({"power": means})
    assert said == "GPUs: 690 W, 1,412 MHz, 98% of the time at the power limit"
    assert power.in_words({"power": None}) == power.in_words({}) == ""
    assert power.in_words({"power": means | {"sm_mhz": None}}) == ""
