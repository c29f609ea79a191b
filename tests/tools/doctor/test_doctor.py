"""The program from end to end: what it prints, writes and returns, alone and in two processes."""

import dataclasses
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jaxpar.commands import call, read
from jaxpar.config import ConfigError
from jaxpar.runtime import exit_codes
from jaxpar.tools.doctor import command, progress
from jaxpar.tools.doctor.measure import bandwidth, verification
from tests import ranks
from tests.fake_nvml import FakeNvml, h200s

pytestmark = pytest.mark.waits

#: What the JSON holds at its top, and of which type.
TOP = {
    **{"schema": int, "verdict": str, "conditions": dict, "findings": list, "seconds": dict},
    **{"processes": list, "collectives": dict, "bandwidth": list, "links": list, "compute": dict},
}


def run(tmp_path, *args: str) -> tuple[int, dict]:
    """The program inside this process: its exit code and its JSON."""
    file = tmp_path / "doctor.json"
    code = call("doctor", ["--run.cpu-devices", "16", "--json", str(file), *args])
    return code, json.loads(file.read_text())


@pytest.mark.slow
def test_sections_that_only_look_and_compute(tmp_path, capsys):
    code, found = run(tmp_path, "--only", "versions,hardware,compute", "--repeats", "1")
    assert code == exit_codes.EXIT_OK and found["verdict"] in ("pass", "warn")
    said = capsys.readouterr().out
    assert "16 simulated CPU devices, as asked" in said and "0 failed" in said
    (process,) = found["processes"]
    assert process["devices"] == ["cpu"] * 16 and process["versions"]["jax"].startswith("0.11")
    rows = found["compute"]["rates"]
    assert [row["what"] for row in rows] == ["matmul float32", "copy", "matmul float32"]
    assert all(len(row["devices"]) == 16 and min(row["devices"]) > 0 for row in rows)
    assert set(found["seconds"]) == {"start", "versions", "hardware", "compute"}
    assert all(set(f) == FINDING and f["status"] in STATUSES for f in found["findings"])


FINDING = {"section", "check", "status", "said", "remedy", "where"}
STATUSES = {"pass", "warn", "fail", "skip"}


def test_a_wrong_collective_makes_the_exit_code_1(tmp_path, capsys, monkeypatch):
    right = verification.COLLECTIVES["all_gather"]
    wrong = dataclasses.replace(right, run=lambda x, axes: jnp.flip(right.run(x, axes), 0))
    monkeypatch.setattr(verification, "SMALL", 32)
    monkeypatch.setattr(verification, "LARGE_ON_CPU", 64)
    for name in [name for name in verification.COLLECTIVES if name != "all_gather"]:
        monkeypatch.delitem(verification.COLLECTIVES, name)
    monkeypatch.setitem(verification.COLLECTIVES, "all_gather", wrong)
    code, found = run(tmp_path, "--only", "collectives", "--mesh", "data=16")
    assert code == exit_codes.EXIT_ERROR and found["verdict"] == "fail"
    assert len(found["collectives"]["rows"]) == 4
    assert all(len(row["wrong"]) == 16 for row in found["collectives"]["rows"])
    (finding,) = found["findings"]
    assert "all_gather over data, float32, 32 elements: device 0 has" in finding["said"]
    assert "Device 15 sent this to position 15" in finding["said"]
    assert "1 failed" in capsys.readouterr().out


def test_a_section_that_cannot_be_run_is_a_finding(tmp_path, capsys, monkeypatch):
    def measure(*_):
        raise RuntimeError("NCCL operation failed")

    monkeypatch.setattr(bandwidth, "measure", measure)
    code, found = run(tmp_path, "--only", "versions,bandwidth")
    assert code == exit_codes.EXIT_ERROR and found["verdict"] == "fail"
    assert "NCCL operation failed" in capsys.readouterr().err
    assert "failed to run: RuntimeError" in found["findings"][-1]["said"]


def test_a_mesh_that_cannot_be_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="takes 4 devices, but there are 16"):
        run(tmp_path, "--mesh", "data=4")
    assert not (tmp_path / "doctor.json").exists()


def test_a_file_is_checked_by_the_process_that_writes_it(tmp_path, monkeypatch):
    """The others may be on hosts where its folder is not there."""
    started = []
    monkeypatch.setattr(command.runtime, "start", lambda *_, **__: started.append("JAX") or [])
    monkeypatch.setattr(command.connecting, "connect", lambda *_: "joined")
    asked = ["--run.cpu-devices", "1", "--json", str(tmp_path / "none" / "doctor.json")]
    joined = "--cluster.coordinator 127.0.0.1:9 --cluster.num-processes 2 --cluster.process-id"
    for alone in ([], [*joined.split(), "0"]):
        with pytest.raises(ConfigError, match=r"--json = .*needs the folder .*none, which does"):
            command.begin(read("doctor", [*asked, *alone]))
    assert not started
    command.begin(read("doctor", [*asked, *joined.split(), "1"]))
    assert started


def test_a_section_that_does_not_end_ends_the_program(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    at_work = progress.SectionProgress(0.05)
    with at_work.section("links"):
        at_work.tell("0 - 1")
        ranks.wait_for(lambda: ended)
    assert ended == [exit_codes.EXIT_HANG]
    assert "error: links: process 0 did not finish in 0.05 s, at: 0 - 1;" in capsys.readouterr().err


def test_gpus_that_jax_does_not_use_make_the_exit_code_1(capsys):
    with FakeNvml(h200s()).installed():
        code = call("doctor", ["--only", "versions,hardware"])
    assert code == exit_codes.EXIT_ERROR
    said = " ".join(capsys.readouterr().out.split())
    assert "fail devices JAX uses the CPU, but there are 8 GPUs -> unset JAX_PLATFORMS" in said
    assert "all pairs, NV18" in said and "18 x 26.6 GB/s" in said and "driver CUDA 13.0" in said
    assert "1 failed" in said


#: The second of two processes has this: it is named, and so is the difference.
HURTS = {"NCCL_P2P_DISABLE": "1"}


def two_processes(tmp_path, *args: str) -> dict:
    """The JSON of two processes with two devices each, of which the second one has HURTS."""
    address, file = f"127.0.0.1:{ranks.free_port()}", tmp_path / "doctor.json"
    doctor = [sys.executable, "-m", "jaxpar.doctor", "--run.cpu-devices", "2", "--json", str(file)]
    started = []
    for own in range(2):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        env = ranks.environment(**place, JAX_PROCESS_ID=str(own), **(HURTS if own else {}))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([*doctor, *args], env=env, **pipes))
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [1, 1], said
    assert "process 0 of 2" in said[0] and "checklist" in said[0]
    assert "checklist" not in said[1]
    found = json.loads(file.read_text())
    assert [process["process"] for process in found["processes"]] == [0, 1]
    by_check = {f["check"]: f for f in found["findings"]}
    assert by_check["NCCL_P2P_DISABLE"]["where"].startswith("process 1 (")
    assert by_check["same environment"]["status"] == "warn"
    assert by_check["same versions"]["status"] == by_check["same devices"]["status"] == "pass"
    return found


@pytest.mark.slow  # quicker: every collective, in test_measuring.py
def test_two_processes(tmp_path):
    args = ["--only", "versions,collectives", "--mesh", "data=4"]
    found = two_processes(tmp_path, *args)
    (finding,) = [f for f in found["findings"] if f["check"] == "collectives"]
    assert finding["status"] == "pass" and len(found["collectives"]["rows"]) == 4


@pytest.mark.slow
def test_every_section_in_two_processes(tmp_path):
    found = two_processes(tmp_path, "--repeats", "1", "--largest", "1KiB")
    assert set(found) == set(TOP) and all(isinstance(found[k], TOP[k]) for k in TOP)
    assert len(found["links"]) == 6 and len(found["bandwidth"]) == 6
    assert all(len(row["devices"]) == 4 for row in found["compute"]["rates"])
    assert {f["check"]: f["status"] for f in found["findings"]}["collectives"] == "pass"
