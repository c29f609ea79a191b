"""The ways between GPUs, network cards and CPUs: what the kernel says, and what the doctor says."""

import dataclasses
import struct

import pytest

from jaxpar.doctor import paths, showing
from jaxpar.doctor.checks import paths as checks
from jaxpar.doctor.facts import HostFacts, StartedAs, of_the_host
from jaxpar.doctor.paths import acs_of
from jaxpar.runtime.gpus import nvidia_smi
from tests.doctor.hosts import nvidia_smi_of
from tests.runtime.kernel_files import CARDS, GPUS, device, link, rdma, two_sockets, write

ADDRESSES = [way.split("/")[-1] for way, _ in GPUS]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Two sockets with a card each, as they should be."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(paths, "finds_verbs", lambda: True)
    two_sockets(tmp_path)
    write(tmp_path / "proc/cpuinfo", "flags : fpu vmx")
    write(tmp_path / "proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64")
    write(tmp_path / "proc/sys/kernel/osrelease", "6.8.0-51-generic")
    write(tmp_path / "sys/module/nvidia_peermem/version", "580")
    for address in bridges():
        write(tmp_path / "sys/bus/pci/devices" / address / "config", config(0x1D & ~0x0C))
    return tmp_path


def bridges():
    return sorted({step for way in [w for w, _ in GPUS] + CARDS for step in way.split("/")[1:-1]})


def config(acs: int, size: int = 4096) -> bytes:
    """A bridge's configuration: AER, then ACS with these bits of control."""
    text = bytearray(size)
    struct.pack_into("<I", text, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", text, 0x148, 0x000D | 1 << 16, 0x00FF, acs)
    return bytes(text)


def ask(arguments):
    """The recorded host's answers, but no addresses: those are in the test's files."""
    if "uuid,pci.bus_id" in str(arguments):
        raise nvidia_smi.Unavailable("asked for addresses")
    return nvidia_smi_of()(arguments)


def facts(root, **env) -> HostFacts:
    return of_the_host(env, ask, StartedAs(coordinator="10.0.0.1"), root)


def found(root) -> dict[str, tuple[str, str]]:
    """{check: (status, what is said)}."""
    own = facts(root)
    made = [*checks.check_paths(own), checks.numa_binding(own)]
    assert all(f.remedy for f in made if f.status in ("warn", "fail"))
    return {f.check: (f.status, f.said) for f in made}


def test_a_host_as_it_should_be(root):
    assert found(root) == {
        "network": ("pass", "ib: 2 active ports of InfiniBand, 400 Gb/sec (4X NDR)"),
        "GPUDirect RDMA": ("pass", "nvidia_peermem and dma-buf"),
        "GPU and card": ("pass", "the nearest card of each GPU: PIX"),
        "IOMMU": ("pass", "off for GPUs and network cards"),
        "PCIe ACS": ("pass", "redirects nothing on 10 bridges"),
        "NUMA binding": ("pass", "CPUs 0-3, near the GPUs on node 0"),
    }
    own = facts(root)
    assert HostFacts.from_json(own.to_json()) == own


def test_a_process_on_all_cpus(root, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    said = "on CPUs 0-7, but the GPUs are near CPUs 0-3 (node 0)"
    assert found(root)["NUMA binding"] == ("warn", said)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert found(root)["NUMA binding"][0] == "pass"
    share = of_the_host({}, ask, StartedAs(share=[1]), root)
    assert share.paths.own == [ADDRESSES[3]]
    assert checks.numa_binding(share).status == "warn"


def test_a_process_on_the_other_socket(root, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5, 6})
    finding = checks.numa_binding(facts(root))
    assert finding.status == "warn" and "--gpu-bind=closest" in finding.remedy


def test_memory_that_cards_cannot_reach(root):
    (root / "sys/module/nvidia_peermem/version").unlink()
    (root / "sys/module/nvidia_peermem").rmdir()
    assert found(root)["GPUDirect RDMA"] == ("pass", "dma-buf")
    write(root / "proc/sys/kernel/osrelease", "5.4.0-generic")
    assert found(root)["GPUDirect RDMA"][0] == "warn"
    write(root / "proc/sys/kernel/osrelease", "6.8.0")
    write(root / "proc/driver/nvidia/version", "NVIDIA UNIX x86_64 Kernel Module")
    assert found(root)["GPUDirect RDMA"][0] == "warn"


def test_an_iommu(root):
    for i, address in enumerate(ADDRESSES):
        link(root / "sys/bus/pci/devices" / address / "iommu_group", root / f"sys/groups/{i}")
        write(root / f"sys/groups/{i}/type", "identity")
    assert found(root)["IOMMU"] == ("pass", "passes through")
    write(root / "sys/groups/3/type", "DMA-FQ")
    status, said = found(root)["IOMMU"]
    assert status == "warn" and said.startswith("DMA-FQ and identity: ")
    write(root / "proc/cpuinfo", "flags : fpu hypervisor")
    assert found(root)["IOMMU"][0] == found(root)["PCIe ACS"][0] == "skip"


def test_switches_that_redirect(root):
    write(root / "sys/bus/pci/devices" / bridges()[3] / "config", config(0x1D))
    status, said = found(root)["PCIe ACS"]
    assert status == "warn" and said.endswith(f"on 1 of 10 bridges: {bridges()[3]}")
    write(root / "sys/bus/pci/devices" / bridges()[3] / "config", config(0x1D, 0x200)[:64])
    assert found(root)["PCIe ACS"] == ("skip", "only root can read it")


def test_the_list_of_capabilities_may_be_empty_or_broken():
    assert acs_of(bytes(4096)) == []
    assert acs_of(config(0x2D)) == ["SrcValid", "ReqRedir", "CmpltRedir", "EgressCtrl"]
    assert acs_of(struct.pack("<I", 1 | 0x100 << 20).rjust(0x104, b"\0") + bytes(8)) == []  # itself
    assert acs_of(bytes(256)) is None


def test_a_card_behind_the_other_socket(root):
    (root / "sys/class/infiniband/mlx5_1/device").unlink()
    way = "pci0000:17/0000:17:05.0/0000:21:00.0"
    device(root, way, 0, "0-3")
    link(root / "sys/class/infiniband/mlx5_1/device", root / "sys/devices" / way)
    status, said = found(root)["GPU and card"]
    assert status == "warn" and f"PIX or SYS; {', '.join(ADDRESSES[2:])}" in said


def test_a_plugin_that_the_loader_does_not_find(root):
    for i in 0, 1:
        (root / f"sys/class/infiniband/mlx5_{i}/ports/1/state").write_text("1: DOWN")
    rdma(root, "rdmap1", "Unspecified", driver="efa")
    status, said = found(root)["network"]
    assert status == "warn" and "so that it uses TCP" in said


def test_a_library_that_the_loader_does_not_find(root, monkeypatch):
    monkeypatch.setattr(paths, "finds_verbs", lambda: False)
    status, said = found(root)["network"]
    assert status == "warn" and "libibverbs.so.1, so that NCCL uses TCP" in said


def test_cards_that_a_container_does_not_have(root):
    for file in (root / "dev/infiniband").glob("*"):
        file.unlink()
    finding = checks.network(facts(root))
    assert finding.status == "warn" and "--device /dev/infiniband" in finding.remedy


def test_nothing_is_judged_without_gpus_or_cards(tmp_path):
    own = of_the_host({}, ask, StartedAs(), tmp_path)
    alone = dataclasses.replace(own, gpus=[])
    assert {f.status for f in checks.check_paths(alone)} == {"skip"}
    found = {f.check: f.status for f in checks.check_paths(own)}
    assert found.pop("network") == found.pop("IOMMU") == "pass"
    assert set(found.values()) == {"skip"}


def test_what_is_shown_of_a_host(root):
    rdma(root, "mlx5_7", "Ethernet")
    own = facts(root, NCCL_CROSS_NIC="1")
    gpus = [gpu | {"pci.bus_id": f"0000{ADDRESSES[i % 4]}"} for i, gpu in enumerate(own.gpus)]
    own = dataclasses.replace(own, gpus=gpus)
    assert showing._cards(own, gpus[0]) == "mlx5_0 PIX"
    assert showing._cards(own, gpus[2]) == "mlx5_1 PIX"
    lines = list(showing._network(own.network))
    assert lines[0].startswith("  network to other hosts: ib, 2 active ports")
    assert "    NCCL_IB_HCA==mlx5_0:1,mlx5_1:1: set in runs on several hosts" in lines
    assert "    NCCL_CROSS_NIC=1: yours" in lines
