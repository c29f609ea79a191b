"""The program on the GPUs of this host."""

import json

import pytest

from jaxpar.commands import call

pytestmark = [pytest.mark.gpu, pytest.mark.several_gpus]


def test_every_section_on_gpus(tmp_path, devices, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    file = tmp_path / "doctor.json"
    call("doctor", ["--largest", "4MiB", "--repeats", "3", "--json", str(file)])
    found = json.loads(file.read_text())
    status = {finding["check"]: finding["status"] for finding in found["findings"]}
    assert status["devices"] == "pass" and len(found["processes"][0]["gpus"]) >= len(devices)
    assert found["compute"]["load"] and found["compute"]["rates"][0]["what"] == "matmul bfloat16"
    if len(devices) > 1:
        assert status["collectives"] == "pass"
        assert len(found["bandwidth"]) == 6 * 4
        assert len(found["links"]) == len(devices) * (len(devices) - 1) // 2
