"""Each check finds what it is for, where one thing is broken in a healthy host, and only that."""

import dataclasses
import json
from pathlib import Path

import pynvml
import pytest

from jaxpar.config import Config
from jaxpar.prediction.hardware import H200
from jaxpar.runtime.gpus import nvml
from jaxpar.runtime.gpus.nvml import GpuLoad
from jaxpar.runtime.timing import Spread
from jaxpar.tools.doctor.checks import gpu as gpu_checks
from jaxpar.tools.doctor.checks import host
from jaxpar.tools.doctor.checks import measured as measured_checks
from jaxpar.tools.doctor.checks.findings import Finding, failed, merge_findings, passed, verdict
from jaxpar.tools.doctor.facts import HostFacts, of_the_host, with_devices
from jaxpar.tools.doctor.measure.bandwidth import BandwidthRow
from jaxpar.tools.doctor.measure.links import Link
from tests import fake_nvml
from tests.fake_nvml import FakeNvml, h200s
from tests.tools.doctor.hosts import facts_of, with_jax

PORT = {"card": "mlx5_0", "port": "1", "state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)"}


def worse(findings: list[Finding]) -> list[tuple[str, str]]:
    """(check, status) of what did not pass, or was left out."""
    return [(f.check, f.status) for f in findings if f.status in ("warn", "fail")]


def all_of(facts: HostFacts) -> list[Finding]:
    """Everything that is said of one process."""
    checks = (host.check_versions, gpu_checks.check, host.check_host)
    return [finding for check in checks for finding in check(facts)]


def test_a_healthy_host_has_nothing_to_say_against_it():
    facts = facts_of(infiniband=[PORT])
    found = all_of(facts)
    assert worse(found) == [] and verdict(found) == "pass"
    said = {f.check: f.said for f in found}
    assert said["NVLink"] == "all pairs, NV18" and said["power limit"] == "the default, 700 W"
    assert said["driver"] == "580.95.05; CUDA 13 needs 580 or newer"
    assert HostFacts.from_json(facts.to_json()) == facts


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Unable to\ninitialize"), "JAX does not start: Unable to initialize"),
        (AssertionError(), "JAX does not start: there is no device for JAX_PLATFORMS=cuda"),
    ],
)
def test_what_jax_says_as_it_fails_to_start(monkeypatch, error, said):
    """With JAX_PLATFORMS=cuda and no visible GPU, JAX's error has no message."""

    def fail():
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("jax.local_devices", fail)
    found = host.backend(with_devices(facts_of(), 0, False))
    assert (found.status, found.said) == ("fail", said)


REASONS = "CurrentClocksEventReasons"
IN_PROGRESS = pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS
COMPLETED = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
PCIE = {"NvLinkState": fake_nvml.NOT_SUPPORTED}
ECC_OFF = {"EccMode": [0, 0], "TotalEccErrors": fake_nvml.NOT_SUPPORTED}

BROKEN_GPUS = [
    (fake_nvml.nvlinks(18, down=[5]), "NVLink", "fail", ": 1 of 18 links down (5)"),
    (fake_nvml.nvlinks(17), "NVLink", "fail", "17 of 18 links"),
    (PCIE, "NVLink", "fail", "28 pairs use PCIe: GPU0-GPU1 PHB"),
    (fake_nvml.fabric(IN_PROGRESS), "NVSwitch fabric", "fail", "7: In Progress, N/A"),
    (fake_nvml.fabric(COMPLETED, 999), "NVSwitch fabric", "fail", "7: Completed, Unknown Error"),
    ({"PowerManagementLimit": 500_000}, "power limit", "warn", "6,7: 500 W of 700 W"),
    ({REASONS: 0x09}, "clocks at rest", "fail", "hardware slowdown"),
    ({REASONS: 0x21}, "clocks at rest", "warn", "thermal slowdown"),
    (fake_nvml.memory_errors(uncorrected=2, ever=2), "ECC", "fail", ": 2 uncorrected"),
    (fake_nvml.memory_errors(ever=2), "ECC", "warn", ": 2 uncorrected in total"),
    (fake_nvml.memory_errors(corrected=7), "ECC", "warn", ": 7 corrected"),
    (ECC_OFF, "ECC", "warn", ": off"),
    (fake_nvml.remapped(1, failed=True), "remapped rows", "fail", ": failed"),
    (fake_nvml.remapped(1, pending=True), "remapped rows", "fail", ": pending"),
    (fake_nvml.remapped(1), "remapped rows", "warn", ": 1 after errors"),
    ({"CurrPcieLinkWidth": 8}, "PCIe", "warn", ": x8 of x16"),
    ({"PersistenceMode": 0}, "persistence mode", "warn", "off"),
    ({"MigMode": [1, 1]}, "MIG", "warn", "on GPU 0, 1"),
    (fake_nvml.memory(61440), "GPUs free", "warn", ": 61,440 MiB in use"),
]


@pytest.mark.parametrize(("change", "check", "status", "said"), BROKEN_GPUS)
def test_what_is_wrong_with_gpus(change, check, status, said):
    found = all_of(facts_of(change))
    assert worse(found) == [(check, status)]
    (finding,) = [f for f in found if f.check == check]
    assert said in finding.said and finding.remedy


V = {"python": "3.12.1", "jaxlib": "0.11.2", "jax": "0.11.2", "driver": "580.95.05"}
HOST = {"cores": 96.0, "shm": 1 << 40, "open_files": 1 << 20, "locked_memory": None}
HOST |= {"cuda_in_path": [], "gpu_files": 8}

BROKEN_HOSTS = [
    ({"versions": V | {"jax-cuda13-plugin": "0.11.2", "driver": "570.1"}}, "driver", "fail"),
    ({"versions": V | {"jax-cuda13-plugin": "0.11.1"}}, "CUDA plugin", "fail"),
    ({"backend": "cpu", "devices": ["cpu"]}, "devices", "fail"),
    ({"gpus": [], "backend": "cpu", "devices": ["cpu"]}, "devices", "fail"),
    ({"backend": "", "devices": [], "backend_error": "no device"}, "devices", "fail"),
    ({"host": HOST | {"shm": 64 << 20}}, "/dev/shm", "warn"),
    ({"host": HOST | {"open_files": 256}}, "open files", "warn"),
    ({"host": HOST | {"cores": 4.0}}, "CPU cores", "warn"),
    ({"host": HOST | {"locked_memory": 65536}, "infiniband": [PORT]}, "locked memory", "fail"),
    ({"infiniband": [PORT, PORT | {"state": "1: DOWN"}]}, "InfiniBand", "warn"),
    ({"gpus": [], "driver_error": nvml.NO_LIBRARY}, "GPUs", "warn"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "check", "status"), BROKEN_HOSTS)
def test_what_is_wrong_with_a_host(fields, check, status):
    found = all_of(facts_of(**fields))
    assert worse(found) == [(check, status)]
    assert next(f for f in found if f.check == check).remedy


def test_jax_with_cuda_on_a_host_without_a_gpu():
    """As in a container that was started without its GPUs."""
    alone = {"gpus": [], "backend": "cpu", "devices": ["cpu"], "host": HOST | {"gpu_files": 0}}
    found = host.backend(facts_of(**alone))
    assert found.status == "warn" and "installed with CUDA, but there is no GPU" in found.said
    assert "docker run --gpus all" in found.remedy
    asked = host.backend(facts_of(**alone, environment={"JAX_PLATFORMS": "cpu"}))
    for_cpu = host.backend(facts_of(**alone, versions=V))
    assert asked.status == for_cpu.status == "pass"


HURTS = [
    ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", "fail"),
    ({"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE", "warn"),
    ({"NCCL_DEBUG": "INFO"}, "NCCL_DEBUG", "warn"),
    ({"NCCL_ALGO": "Ring"}, "NCCL_ALGO", "warn"),
    ({"JAX_DISABLE_JIT": "True"}, "JAX_DISABLE_JIT", "fail"),
    ({"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}, "XLA_FLAGS", "warn"),
    ({"XLA_FLAGS": "--xla_dump_to=dump --xla_gpu_autotune_level=4"}, "XLA_FLAGS", "warn"),
]
HARMLESS = {
    **{"NCCL_P2P_DISABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "x"},
    "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_other=1",
}


def test_a_driver_that_fails_is_no_host_without_gpus():
    fields = {"gpus": [], "backend": "cpu", "devices": ["cpu"], "versions": V}
    alone = facts_of(**fields, host=HOST | {"gpu_files": 0})
    silent = dataclasses.replace(alone, driver_error=nvml.NO_LIBRARY)
    broken = dataclasses.replace(alone, driver_error="NVML does not start: Driver Not Loaded")
    assert worse(all_of(alone)) == worse(all_of(silent)) == []
    assert worse(all_of(broken)) == [("GPUs", "fail")]


def test_gpus_that_nobody_uses():
    def status(*devices: int, **env: str) -> str:
        each = [facts_of(devices=["NVIDIA H200"] * n, env=env) for n in devices]
        return gpu_checks.used(each).status

    assert status(8) == status(4, 4) == status(4, CUDA_VISIBLE_DEVICES="0,1,2,3") == "pass"
    assert status(7) == status(4, 2) == "warn"


@pytest.mark.parametrize(("env", "check", "status"), HURTS)
def test_variables_that_hurt(env, check, status):
    assert worse(all_of(facts_of(env=env | {"HOME": "x"}))) == [(check, status)]
    assert worse(all_of(facts_of(env=HARMLESS))) == []


def test_a_table_of_ones_own_kernels_does_not_hurt():
    own = "--xla_gpu_load_autotune_results_from=runs/mine.textproto"
    rows = host.xla_flags.matching_rows("NVIDIA H200", "0.11.2", Config())
    assert any(own.startswith(f"--{row.name}=") for row in rows)  # another one was measured
    assert worse(all_of(facts_of(env={"XLA_FLAGS": own}))) == []
    both = f"{own} --xla_gpu_enable_latency_hiding_scheduler=false"
    (finding,) = host.flags(facts_of(env={"XLA_FLAGS": both}))
    assert "latency_hiding" in finding.said


def test_one_gpu_alone_is_named():
    gpus = h200s()
    gpus[3] |= fake_nvml.remapped(pending=True)
    with FakeNvml(gpus).installed():
        found = all_of(with_jax(of_the_host({})))
    (finding,) = [f for f in found if f.status == "fail"]
    assert (finding.check, finding.said) == ("remapped rows", "GPU 3: pending")


def test_the_page_has_every_check():
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    named = {name.strip() for row in rows for name in row.split(",")}
    facts = facts_of(infiniband=[PORT])
    found = [*all_of(facts), gpu_checks.used([facts])]
    found += host.check_together([facts, facts], [1.0, 1.0])
    names = {finding.check for finding in found} - {"environment"}
    assert names and not names - named


def test_secrets_and_unrelated_variables_stay_out():
    facts = facts_of(env={"AWS_SECRET": "x", "NCCL_DEBUG": "WARN", "WANDB_API_KEY": "y"})
    assert facts.environment == {"NCCL_DEBUG": "WARN"}


def test_cuda_libraries_from_elsewhere(tmp_path):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "libcublas.so.12").touch()
    (tmp_path / "other").mkdir()
    for path, found in ((f"{tmp_path}/other", []), (f"{tmp_path}/other:{tmp_path}/cuda", 1)):
        versions = facts_of().versions | {"nvidia-cublas": "13.0"}
        facts = facts_of(env={"LD_LIBRARY_PATH": path}, versions=versions)
        assert worse(all_of(facts)) == ([("LD_LIBRARY_PATH", "warn")] if found else [])
        assert facts.environment["LD_LIBRARY_PATH"] == path


def test_flags_are_read():
    text = "--xla_a=1 --xla_b  --xla_c= --xla_d=x,y"
    assert host.flags_of(text) == {"xla_a": "1", "xla_b": "true", "xla_c": "", "xla_d": "x,y"}


# ---------------------------------------------------------------------------- several processes


def test_processes_that_differ():
    one = facts_of()
    two = dataclasses.replace(one, process=1, host=one.host | {"name": "gpu02"})
    times = [100.0, 100.004]
    assert worse(host.check_together([one, two], times)) == []
    older = dataclasses.replace(two, versions=two.versions | {"jaxlib": "0.11.1"})
    (finding,) = [f for f in host.check_together([one, older], times) if f.status == "fail"]
    assert finding.check == "same versions"
    assert finding.said == "jaxlib: 0.11.2 in process 0 and 0.11.1 in process 1"
    changed = {"XLA_FLAGS": "--xla_gpu_x=1"}
    for fields, check, status in (
        ({"versions": two.versions | {"driver": "580.1"}}, "same versions", "warn"),
        ({"versions": two.versions | {"python": "3.13.0"}}, "same versions", "fail"),
        ({"environment": changed}, "same environment", "fail"),
        ({"environment": {"NCCL_IB_HCA": "x"}}, "same environment", "warn"),
        ({"devices": ["NVIDIA H100 80GB HBM3"] * 8}, "same devices", "fail"),
    ):
        other = dataclasses.replace(two, **fields)
        assert worse(host.check_together([one, other], times)) == [(check, status)]
    skew = worse(host.check_together([one, two], [100.0, 130.0]))
    assert skew == [("clocks of hosts", "warn")]
    assert host.check_together([one], [1.0]) == []


def test_findings_of_processes_come_once_where_they_agree():
    good, bad = passed("a", "fine"), failed("b", "broken", "mend it")
    found = merge_findings([[good, bad], [good]], ["process 0 (x)", "process 1 (y)"])
    assert [(f.check, f.where) for f in found] == [("a", ""), ("b", "process 0 (x)")]


# ------------------------------------------------------------------------------------- measured


def rates(**changes: float) -> dict:
    """Rates of eight GPUs, those of a healthy H200 times `changes`."""
    shares = {"bf16": 0.95, "float8": 0.95, "copy": 1.0, "pinned": 1.0} | changes
    return {
        ("matmul bfloat16", "big"): [shares["bf16"] * H200.matmul.value] * 8,
        ("matmul float8", "big"): [shares["float8"] * H200.float8.value] * 8,
        ("copy", "1024 MiB"): [shares["copy"] * H200.bandwidth.value] * 8,
        ("host to device", "256 MiB, pinned"): [shares["pinned"] * 50e9] * 8,
    }


def measured(found: dict) -> list[tuple[str, str]]:
    names = [f"GPU {i}" for i in range(8)]
    return worse(
        [
            *measured_checks.matmul(found, "NVIDIA H200"),
            measured_checks.slow_gpus(found, names, True),
            *measured_checks.transfers(found),
        ]
    )


def test_rates_are_held_against_the_data_sheet_and_against_one_another():
    assert measured(rates()) == []
    assert measured(rates(bf16=0.8)) == [("matmul bfloat16", "warn")]
    assert measured(rates(bf16=0.4, copy=0.5)) == [("matmul bfloat16", "fail"), ("copy", "fail")]
    assert measured(rates(pinned=0.1)) == [("host transfers", "warn")]
    lame = rates()
    lame["matmul bfloat16", "big"][3] *= 0.8
    assert measured(lame) == [("slow GPU", "warn")]
    said = measured_checks.slow_gpus(lame, [f"GPU {i}" for i in range(8)], True).said
    assert said == "GPU 3: matmul bfloat16 big at 80% of the median"
    (finding,) = measured_checks.matmul(rates(), "NVIDIA RTX 5090")
    assert finding.status == "skip"


def test_a_slow_pair_is_named():
    names = [f"GPU {i}" for i in range(4)]
    links = [Link((a, b), 380e9, 380e9, 740e9) for a in range(4) for b in range(a + 1, 4)]
    assert measured_checks.slow_pairs(links, names, True).status == "pass"
    links[4] = Link((1, 3), 380e9, 90e9, 180e9)
    finding = measured_checks.slow_pairs(links, names, True)
    assert finding.status == "fail" and "GPU 1 - GPU 3 90 GB/s, median 370" in finding.said
    assert measured_checks.slow_pairs(links, names, False).status == "skip"
    assert measured_checks.slow_pairs([], names, True).status == "skip"


def test_bus_bandwidth_against_nvlink():
    def rows(seconds: float) -> list[BandwidthRow]:
        spread = Spread(seconds, seconds, seconds)
        return [
            BandwidthRow("all-gather", 1 << 30, 8, spread),
            BandwidthRow("permute", 1 << 30, 8, spread),
        ]

    fast, slow = rows(0.0027), rows(0.01)
    of_three = (1 << 22, (1 << 26) - 4)  # --largest 64MiB, in whole numbers on three devices
    few = [BandwidthRow("all-gather", size, 3, fast[0].call) for size in of_three]
    assert worse(measured_checks.bus_bandwidth(few, H200, True)) == [("bus bandwidth", "warn")]
    (finding,) = measured_checks.bus_bandwidth(few[:1], H200, True)
    assert (finding.status, finding.said) == ("skip", "no message of 64 MiB or more was sent")
    assert fast[0].bus == pytest.approx(7 / 8 * (1 << 30) / 0.0027)
    assert worse(measured_checks.bus_bandwidth(fast, H200, True)) == []
    assert worse(measured_checks.bus_bandwidth(slow, H200, True)) == [("bus bandwidth", "warn")]
    for gpu, one_host in ((None, True), (H200, False)):
        (finding,) = measured_checks.bus_bandwidth(slow, gpu, one_host)
        assert finding.status == "skip"


def test_clocks_under_load():
    capped = GpuLoad(index=0, uuid="x", sm_clock=1400, temperature=60, clock_event_reasons=0x04)
    (finding,) = measured_checks.under_load([capped, capped])
    assert finding.said == "1400 to 1400 MHz, at most 60 °C, 2 at the power limit"
    hot = dataclasses.replace(capped, clock_event_reasons=0x44)
    assert worse(measured_checks.under_load([capped, hot])) == [("clocks under load", "fail")]
    assert measured_checks.under_load([]) == []


def test_a_wrong_collective_fails():
    assert measured_checks.wrong_collectives([], 100).status == "pass"
    assert measured_checks.wrong_collectives([], 0).status == "skip"
    found = measured_checks.wrong_collectives(["psum over data: x"] * 5, 100)
    assert found.status == "fail" and found.said.endswith("; and 2 more")
    assert json.dumps(dataclasses.asdict(found))
