"""Compute, communication, exposed and idle time: by hand, and of a piece of a real trace."""

import pytest

from jaxpar.tools.profiling import breakdown, table
from jaxpar.tools.profiling.trace import read as trace
from jaxpar.tools.profiling.trace.read import KernelTrace, NoKernels, ProfiledKernel
from tests.tools.profiling.test_names import NAMES

GEMM, FUSION = NAMES["matmul"][0], NAMES["fusion"][0]
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def step_of(*pieces):
    """Kernels from (name, start, end)."""
    return [ProfiledKernel(name, start, end) for name, start, end in pieces]


def figures(*pieces):
    """The figures of a step of such kernels."""
    return breakdown.of_step(breakdown.sort_kernels(step_of(*pieces)))


def test_a_gather_half_hidden():
    found = figures((GEMM, 0, 10), (GATHER, 6, 16), (FUSION, 20, 30))
    assert found == {
        "step": 30,
        "compute": 20,
        "communication": 10,
        "hidden": 4,
        "exposed": 6,
        "idle": 4,
    }


@pytest.mark.parametrize(
    ("pieces", "exposed", "idle"),
    [
        ([(GEMM, 0, 10)], 0, 0),
        ([(GATHER, 0, 10)], 10, 0),
        ([(GEMM, 0, 10), (GATHER, 2, 8)], 0, 0),
        ([(GATHER, 0, 10), (GEMM, 2, 8)], 4, 0),
        ([(GATHER, 0, 10), (GEMM, 2, 4), (FUSION, 6, 8)], 6, 0),
        ([(GATHER, 0, 10), (SCATTER, 5, 15), (GEMM, 12, 20)], 12, 0),  # two at once, once counted
        ([(GEMM, 0, 10), (FUSION, 5, 12), (GEMM, 20, 25)], 0, 8),  # two streams of compute
        ([(GEMM, 0, 4), (GATHER, 6, 8), (GEMM, 10, 12)], 2, 4),
    ],
)
def test_exposed_and_idle(pieces, exposed, idle):
    found = figures(*pieces)
    assert (found["exposed"], found["idle"]) == (exposed, idle)
    assert found["step"] == found["compute"] + found["exposed"] + found["idle"]
    assert found["communication"] == found["hidden"] + found["exposed"]


def test_exposed_time_is_counted_for_one_kind():
    kernels = breakdown.sort_kernels(
        step_of((GATHER, 0, 10), (SCATTER, 5, 15), (GEMM, 12, 20), (GATHER, 30, 31))
    )
    by_kind = breakdown.exposed_by_kind(kernels)
    assert by_kind == {"all-gather": 11, "reduce-scatter": 2}
    assert sum(by_kind.values()) == breakdown.of_step(kernels)["exposed"]


def test_means_over_steps_and_devices_and_the_worst():
    ms = 1_000_000
    quick = step_of((GEMM, 0, 10 * ms), (GATHER, 10 * ms, 12 * ms))
    slow = step_of((GEMM, 20 * ms, 30 * ms), (GATHER, 30 * ms, 36 * ms))
    both = KernelTrace("m", {0: [quick, slow], 1: [slow, slow]})
    found = breakdown.profile(both)
    assert (found["devices"], found["steps"]) == (2, 2)
    assert found["ms"]["step"] == pytest.approx((12 + 16 + 16 + 16) / 4)
    assert found["ms"]["exposed"] == pytest.approx(5)
    assert found["worst_device_ms"]["exposed"] == pytest.approx(6)
    assert found["exposed_share"] == pytest.approx(5 / 15)
    assert found["by_class"]["matmul"] == {"ms": pytest.approx(10), "count": 1}
    assert found["communication"]["all-gather"]["exposed_ms"] == pytest.approx(5)
    gather = next(k for k in found["top_kernels"] if k["class"] == "all-gather")
    assert gather["name"] == "ncclDevKernel_AllGather_RING_LL"
    assert gather["mean_us"] == pytest.approx(5000) and gather["count"] == 1
    assert found["unattributed_ms"] == pytest.approx(15)


def test_the_time_between_steps():
    steps = [step_of((GEMM, 0, 10)), step_of((GEMM, 13, 20)), step_of((GEMM, 25, 26))]
    assert breakdown.between_steps(steps) == 4
    assert breakdown.between_steps(steps[:1]) is None


def test_without_a_step_there_is_no_profile():
    for devices in ({}, {0: []}):
        with pytest.raises(NoKernels, match="no step of m"):
            breakdown.profile(KernelTrace("m", devices))


def test_the_real_piece(real_trace, real_hlo):
    found = breakdown.profile(trace.read(real_trace), real_hlo)
    ms = found["ms"]
    assert ms["step"] == pytest.approx(71.967, abs=1e-3)
    assert ms["compute"] == pytest.approx(67.288, abs=1e-3)
    assert ms["exposed"] == pytest.approx(4.568, abs=1e-3)
    assert ms["idle"] == pytest.approx(0.111, abs=1e-3)
    assert ms["step"] == pytest.approx(ms["compute"] + ms["exposed"] + ms["idle"])
    counts = {what: row["count"] for what, row in found["by_class"].items()}
    assert counts == {"matmul": 23, "attention": 2, "fusion": 51, "copy": 21, "communication": 8}
    kinds = found["communication"]
    assert {kind: row["count"] for kind, row in kinds.items()} == {"all-to-all": 6, "all-gather": 2}
    assert sum(row["exposed_ms"] for row in kinds.values()) == pytest.approx(ms["exposed"])
    assert found["unattributed_ms"] == 0
    top = found["top_kernels"][0]
    assert top["class"] == "attention" and top["count"] == 2
    assert top["scope"].endswith("checkpoint/attention/anonymous/mpmd_map")
    scopes = {(row["pass"], row["scope"]) for row in found["by_scope_ms"]}
    assert {("backward", "attention"), ("backward", "feed_forward")} <= scopes


def test_the_table(real_trace, real_hlo):
    found = breakdown.profile(trace.read(real_trace), real_hlo)
    sent = {"kinds": {"all-gather": {"count": 2, "bytes": 3_300_000_000}}}
    text = table.table(found, sent)
    assert "profile of 2 steps, mean of 2 devices (worst), ms per step" in text
    assert "compute by pass: recompute 0.6   backward 66.7\n" in text
    assert "step 72.0   compute 67.3   exposed communication 4.6 (5.0), 6.3%" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("  all-gather ")]
    assert row == ["all-gather", "3.3", "2.8", "2", "3.30", "GB", "998", "GB/s"]
    (row,) = [line.split() for line in text.splitlines() if line.startswith("  all-to-all ")]
    assert row[-2:] == ["-", "-"]
    assert all(len(line) < 200 for line in text.splitlines())


def test_the_table_of_one_device_without_communication():
    text = table.table(breakdown.profile(KernelTrace("m", {0: [step_of((GEMM, 0, 5_000_000))]})))
    assert "mean of" not in text and "collective" not in text and "between" not in text
    assert "step 5.0   compute 5.0" in text
