"""Facts about GPUs: what NVML's answers become, and what is said of a driver without answers."""

from pathlib import Path

import pynvml
import pytest

from jaxpar.runtime.gpus import nvml, visible
from jaxpar.runtime.gpus.nvml import GpuFacts
from tests import fake_nvml
from tests.fake_nvml import NOT_FOUND, NOT_SUPPORTED, FakeNvml, h200, h200s, named, nvlinks

MIB = 1 << 20


def test_all_facts_of_a_gpu():
    with FakeNvml(h200s()).installed() as fake:
        found = nvml.gpus()
        assert visible.gpu_name() == "NVIDIA H200" and nvml.cuda_of_driver() == "13.0"
    assert fake.opened == 0 and [gpu.index for gpu in found] == list(range(8))
    assert found[2] == GpuFacts(
        index=2,
        uuid="GPU-00000002-aaaa-bbbb-cccc-000000000002",
        power_draw=76.41,
        sm_clock=345,
        clock_event_reasons=1,
        temperature=30,
        name="NVIDIA H200",
        address="0000:3a:00.0",
        driver_version="580.95.05",
        memory_total=143771 * MIB,
        memory_used=MIB,
        power_limit=700.0,
        default_power_limit=700.0,
        max_sm_clock=1980,
        memory_clock=3201,
        max_memory_clock=3201,
        persistence_mode=True,
        mig=False,
        compute_mode="Default",
        ecc=True,
        corrected_errors=0,
        uncorrected_errors=0,
        all_uncorrected_errors=0,
        remapped_rows=0,
        remapping_pending=False,
        remapping_failed=False,
        pcie_generation=5,
        pcie_width=16,
        max_pcie_width=16,
        fabric_state="Completed",
        fabric_status="Success",
        nvlinks=(26.562,) * 18,
    )


def test_what_a_gpu_or_its_driver_does_not_tell_is_none():
    bare = named("0000:01:00.0", "GPU-a") | {"Name": "NVIDIA T4"}
    facts = {"index": 0, "uuid": "GPU-a", "address": "0000:01:00.0", "name": "NVIDIA T4"}
    with FakeNvml([bare]).installed():
        assert nvml.gpus() == [GpuFacts(**facts, driver_version="580.95.05")]
    older = {"CurrentClocksEventReasons": NOT_FOUND, "GpuFabricInfoV": NOT_FOUND}
    with FakeNvml(h200s(**older)).installed():
        (first, *_) = nvml.gpus()
    assert first.clock_event_reasons is first.fabric_state is first.fabric_status is None
    assert first.throttle_reasons == [] and not first.at_power_limit and first.power_limit == 700


def test_gpus_that_a_job_may_not_use_are_left_out():
    with FakeNvml([fake_nvml.FORBIDDEN, h200(1), h200(2)]).installed():
        assert [gpu.index for gpu in nvml.gpus()] == [gpu.index for gpu in nvml.loads()] == [1, 2]
        assert nvml.addresses() == {
            "0000:29:00.0": "GPU-00000001-aaaa-bbbb-cccc-000000000001",
            "0000:3a:00.0": "GPU-00000002-aaaa-bbbb-cccc-000000000002",
        }


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (FakeNvml(start=fake_nvml.NO_LIBRARY), nvml.NO_LIBRARY),
        (FakeNvml(start=fake_nvml.NO_DRIVER), "NVML does not start: Driver Not Loaded"),
        (FakeNvml([h200(0), fake_nvml.LOST]), "GPU 1: GPU is lost"),
        (FakeNvml([h200(0, PowerUsage=fake_nvml.LOST)]), "GPU 0: GPU is lost"),
        (FakeNvml(), "the driver finds no GPU"),
    ],
)
def test_a_driver_that_does_not_respond(fake, said):
    with fake.installed():
        with pytest.raises(nvml.Unavailable, match=f"^{said}$"):
            nvml.gpus()
        assert visible.gpu_name() == "" and fake.opened == 0


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_this_host_without_a_driver():
    with pytest.raises(nvml.Unavailable):
        nvml.gpus()


# -------------------------------------------------------------------------------------- links


def ways(*gpus: fake_nvml.Gpu) -> dict[str, dict[str, str]]:
    with FakeNvml(gpus).installed():
        return nvml.links()


def test_gpus_behind_nvswitch():
    assert ways(*h200s()) == {
        f"GPU{a}": {f"GPU{b}": "NV18" for b in range(8) if b != a} for a in range(8)
    }
    assert ways(h200(0), h200(1, **nvlinks(18, down=[3])))["GPU0"] == {"GPU1": "NV17"}
    hidden = {"NvLinkRemoteDeviceType": NOT_SUPPORTED, "NvLinkRemotePciInfo": NOT_SUPPORTED}
    assert ways(*h200s(**hidden))["GPU0"] == {f"GPU{b}": "NV18" for b in range(1, 8)}


def test_gpus_of_two_partitions_do_not_reach_each_other_through_nvswitch():
    completed = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    other = h200(2, **fake_nvml.fabric(completed, clique=1))
    assert ways(h200(0), h200(1), other)["GPU0"] == {"GPU1": "NV18", "GPU2": "PHB"}


def test_gpus_with_bridges():
    """Two pairs, as with bridges on PCIe cards; a bridge leads to a GPU that is not this job's."""
    first, second, third = "0000:18:00.0", "0000:29:00.0", "0000:f0:00.0"
    gpus = [
        h200(0, **nvlinks(4, to=[second] * 3 + [third])),
        h200(1, **nvlinks(4, to=[first] * 3 + [third])),
        h200(2, **nvlinks(2, to=[third] * 2)),
    ]
    found = ways(*gpus)
    assert found["GPU0"] == {"GPU1": "NV3", "GPU2": "PHB"}
    assert found["GPU2"] == {"GPU0": "PHB", "GPU1": "PHB"}


def test_gpus_on_pcie():
    levels = {0: None, 1: pynvml.NVML_TOPOLOGY_SINGLE, 2: pynvml.NVML_TOPOLOGY_SYSTEM}
    alone = {"NvLinkState": NOT_SUPPORTED, "TopologyCommonAncestor": levels}
    assert ways(*(h200(i, **alone) for i in range(3)))["GPU0"] == {"GPU1": "PIX", "GPU2": "SYS"}
    silent = alone | {"TopologyCommonAncestor": NOT_SUPPORTED}
    assert ways(h200(0, **silent), h200(1, **silent)) == ways(h200(0)) == {}


def test_speeds_of_links():
    def common(fields):
        """As before Hopper: one speed for all links."""
        known = pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
        found = [pynvml.c_nvmlFieldValue_t(fieldId=field) for field, _ in fields]
        for value in found:
            value.nvmlReturn = 0 if value.fieldId == known else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.value.uiVal = 25781 if value.fieldId == known else 0
        return found

    def speeds(**answers):
        with FakeNvml([h200(0, **answers)]).installed():
            return nvml.gpus()[0].nvlinks

    assert speeds(**nvlinks(3, down=[1])) == (26.562, None, 26.562)
    assert speeds(**nvlinks(3, down=[1]) | {"FieldValues": common}) == (25.781, None, 25.781)
    assert speeds(**nvlinks(2) | {"FieldValues": NOT_SUPPORTED}) == (0.0, 0.0)
