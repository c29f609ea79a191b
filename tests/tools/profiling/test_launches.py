"""How kernels were launched: texts of the profiler, waves, calls of the host, and gaps."""

import pytest

from jaxpar.tools.profiling.launching import launching
from jaxpar.tools.profiling.trace import read as trace
from jaxpar.tools.profiling.trace.read import (
    Chip,
    HostCall,
    LaunchShape,
    ProfiledKernel,
    chip_of,
    shape_of,
    waves,
)
from tests.tools.profiling.xspace import HOST, Event, launches, write

DETAILS = (
    "regs:168 static_shared:1024 dynamic_shared:232448 grid:132,1,1 block:384,1,1 occ_pct:18.75"
)
H100 = Chip(132, 2048)


def test_the_profilers_text():
    assert shape_of(DETAILS) == LaunchShape(132, 384, 168, 233_472, 0.1875)
    assert shape_of(DETAILS.replace("18.75", "0")).occupancy is None


@pytest.mark.parametrize("text", [None, "", "regs:1", "grid:a,1 block:1", "grid:1,,1 block:1,1,1"])
def test_other_texts_are_unknown(text):
    assert shape_of(text) is None


@pytest.mark.parametrize(
    ("blocks", "threads", "occupancy", "expected"),
    [
        (132, 384, 0.1875, 1.0),  # one block a multiprocessor
        (66, 384, 0.1875, 0.5),
        (65536, 128, 1.0, 65536 / (132 * 16)),
        (132 * 16, 100, 1.0, 1.0),  # 100 threads take four warps
        (10, 128, None, None),
    ],
)
def test_waves(blocks, threads, occupancy, expected):
    found = waves(LaunchShape(blocks, threads, 32, 0, occupancy), H100)
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_limits_of_a_gpu():
    stats = {"core_count": 132, "compute_cap_major": 9, "compute_cap_minor": 0}
    assert chip_of(stats) == H100
    assert chip_of({}) is None and chip_of(stats | {"compute_cap_major": 7}) is None


# -------------------------------------------------------------------------------- gaps, by hand


def kernel(start: int, end: int, call: tuple[int, int] | None, graph: bool = False):
    made = None if call is None else HostCall(*call, graph="CudaGraph:7" if graph else "")
    return ProfiledKernel("k", start, end, call=made)


def test_a_late_host_and_a_queue():
    step = [
        kernel(100, 200, (0, 10)),
        kernel(203, 300, (10, 20)),  # queued: a gap of 3
        kernel(450, 500, (430, 460)),  # launched after the end at 300: 130 late, then 20
        kernel(500, 510, (440, 445)),  # no gap
    ]
    found = launching([[step]])
    assert (found["calls"], found["graphs"], found["kernels"], found["gaps"]) == (4, 0, 4, 2)
    assert found["late_ms"] == pytest.approx(130e-6)
    assert found["queued_ms"] == pytest.approx(23e-6)
    assert found["idle_ms"] == pytest.approx(153e-6)
    assert found["latency_us"] == {"least": 0.02, "median": 0.02, "most": 0.02}
    assert found["between_us"] == 0.003
    assert found["host_ms"] == pytest.approx(55e-6)
    assert found["ahead_ms"]["least"] == pytest.approx(20e-6)
    assert found["between_steps_late"] is None


def test_kernels_of_a_graph_share_its_call():
    step = [kernel(100 + 10 * n, 110 + 10 * n, (0, 50), graph=True) for n in range(4)]
    step.append(kernel(150, 160, (50, 60)))
    found = launching([[step, step]])
    assert (found["calls"], found["graphs"], found["in_graphs"], found["kernels"]) == (2, 1, 4, 5)
    assert found["ahead_ms"]["median"] == pytest.approx(100e-6)
    assert found["by_graph"] == {"CudaGraph:7": {"calls": 1.0, "kernels": 4.0, "ms": 40e-6}}
    assert found["distinct_graphs"] == 1


def test_a_profile_names_only_the_longest_graphs(monkeypatch):
    monkeypatch.setattr("jaxpar.tools.profiling.launching.GRAPHS", 0)
    found = launching([[[kernel(100, 110, (0, 50), graph=True)]]])
    assert found["by_graph"] == {} and found["distinct_graphs"] == 1


def test_the_time_between_steps():
    steps = [[kernel(0, 100, (0, 1))], [kernel(200, 300, (180, 190))], [kernel(400, 500, (50, 60))]]
    assert launching([steps])["between_steps_late"] == pytest.approx(80 / 200)


def test_overlapping_streams_have_no_gap():
    step = [kernel(0, 100, (0, 1)), kernel(10, 20, (1, 2)), kernel(90, 120, (2, 3))]
    assert launching([[step]])["gaps"] == 0


def test_without_the_hosts_calls_nothing_is_known():
    assert launching([[[kernel(0, 10, None)]]]) is None and launching([]) is None


def test_calls_and_shapes_in_a_trace(tmp_path):
    stats = {"correlation_id": 5, "hlo_module": "jit_f", "kernel_details": DETAILS}
    gpu = {"Stream #1(Compute)": [Event("nvjet_a", 100, 50, stats)]}
    host = {"thread": launches(0, "jit_f", [(10, 40, [5])])}
    path = write(tmp_path / "a.xplane.pb", {"/device:GPU:0": gpu, HOST: host})
    (found,) = trace.read(path).devices[0][0]
    assert found.shape == shape_of(DETAILS) and found.call == HostCall(11, 12)


def test_the_real_piece(real_trace):
    found = launching(list(trace.read(real_trace).devices.values()))
    graph, first = next(iter(found["by_graph"].items()))
    assert graph.startswith("CudaGraph:") and first["ms"] > 0
    assert (found["calls"], found["graphs"], found["in_graphs"], found["kernels"]) == (
        28,
        8,
        85,
        105,
    )
    assert found["late_ms"] == 0 and found["idle_ms"] == pytest.approx(0.111, abs=1e-3)
    assert found["ahead_ms"]["median"] == pytest.approx(871, abs=1)
