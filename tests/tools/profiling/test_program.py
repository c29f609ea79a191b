"""`python -m jaxpar.profile` on the piece of a real trace, and what it refuses."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.monitoring import hlo, profile_folder
from jaxpar.monitoring.profiler import capture
from jaxpar.runtime import exit_codes
from jaxpar.tools.profiling import loading, memory, sections
from jaxpar.tools.profiling.trace import cpu_trace, xspace
from jaxpar.tools.profiling.trace import read as trace
from jaxpar.tools.profiling.trace.cpu_trace import multiplications
from tests.tools.profiling.xspace import HOST, Event, write

PIECE = Path(__file__).parent / "fsdp4.xplane.pb.gz"


@pytest.fixture(scope="module")
def piece(tmp_path_factory) -> dict:
    """Every figure of the piece, with an H200's peaks, and the text under "text"."""
    path = tmp_path_factory.mktemp("figures") / "piece.json"
    with pytest.MonkeyPatch.context() as patch:
        text: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: text.append(" ".join(words)))
        call("profile", [str(PIECE), "--gpu", "h200", "--json", str(path)])
    return json.loads(path.read_text("utf-8")) | {"text": "\n".join(text)}


def test_time_of_the_piece(piece):
    found = piece["profile"]
    assert found["ms"]["step"] == pytest.approx(71.967, abs=1e-3)
    assert found["devices_ms"]["0"]["exposed"] == pytest.approx(4.97, abs=0.01)
    assert found["straggler"]["device"] == "1" and 0.004 < found["straggler"]["over"] < 0.006
    assert "no straggler: compute times are at most 0.5% above their mean" in piece["text"]
    assert piece["collective_bytes"]["kinds"]["all-gather"]["count"] == 2


def test_memory_of_the_piece(piece):
    """XLA's plan of the whole step: the card of the same run has a peak of 110.6 GiB."""
    found = piece["memory"]
    gib = 2**30
    assert found["arguments"] / gib == pytest.approx(22.44, abs=0.01)
    assert found["temporaries"] / gib == pytest.approx(87.96, abs=0.01)
    peak = max(size for _, size in found["live"])
    assert peak / gib == pytest.approx(87.57, abs=0.01)
    assert sum(buffer["size"] for buffer in found["at_peak"]) == peak
    assert found["live"][-1][1] == 0
    assert "compiled memory per device: 110 GiB" in piece["text"]
    assert "87.6 GiB |" in piece["text"]


def test_without_the_hlo_classes_are_told_by_name(tmp_path, capsys):
    alone = tmp_path / "alone.xplane.pb"
    alone.write_bytes(gzip.decompress(PIECE.read_bytes()))
    call("profile", [str(alone)])
    text = capsys.readouterr().out
    assert "missing: the step's HLO" in text
    assert "matmul         50.3" in text


# ---------------------------------------------------------------------------------- refused


def refused(*args: str) -> str:
    with pytest.raises(ConfigError) as error:
        call("profile", args)
    return str(error.value)


def test_paths_that_hold_no_profile(tmp_path):
    assert "does not exist. Fix: give a run folder" in refused(str(tmp_path / "nowhere"))
    assert "contains no profile. Fix: set --profile.start" in refused(str(tmp_path))
    other = tmp_path / "notes.txt"
    other.write_text("{}")
    assert "is not a trace file. Fix: give a file NAME.xplane.pb" in refused(str(other))


@pytest.mark.parametrize("change", [lambda data: data[:-500], lambda data: b"not a trace" * 99])
def test_files_that_are_no_trace(tmp_path, change):
    file = tmp_path / "bad.xplane.pb"
    file.write_bytes(change(gzip.decompress(PIECE.read_bytes())))
    assert "is not a profiler trace or is truncated" in refused(str(file))
    packed = tmp_path / "bad.xplane.pb.gz"
    packed.write_bytes(PIECE.read_bytes()[:-500])
    assert "is not a profiler trace or is truncated" in refused(str(packed))


def cut_off(data: bytes) -> bytes:
    return data[:-500]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("process_1.xplane.pb", lambda: cut_off(gzip.decompress(PIECE.read_bytes()))),
        ("process_1.xplane.pb.gz", lambda: cut_off(PIECE.read_bytes())),
        ("process_1.xplane.pb.gz", lambda: b"not packed"),
    ],
)
def test_a_trace_of_another_process_that_is_cut_off(tmp_path, name, data):
    first = tmp_path / "process_0.xplane.pb"
    first.write_bytes(gzip.decompress(PIECE.read_bytes()))
    (tmp_path / name).write_bytes(data())
    assert f"{name} is not a profiler trace or is truncated" in refused(str(tmp_path))


def test_every_host_counts_whatever_its_name(tmp_path):
    for host in ("10.0.0.1", "10.0.0.2", "process_3"):
        shutil.copy(PIECE, tmp_path / f"{host}.xplane.pb.gz")
    devices = loading.load(str(tmp_path)).trace.devices
    assert set(devices) == {f"{host}:{n}" for host in ("10.0.0.1", "10.0.0.2", "3") for n in (0, 1)}


@pytest.mark.slow
def test_a_trace_of_nothing(tmp_path):
    with capture(tmp_path):
        pass
    assert "neither a GPU plane nor CPU instructions" in refused(str(tmp_path))
    empty = tmp_path / "empty" / "a.xplane.pb"
    empty.parent.mkdir()
    empty.touch()
    assert "nor CPU instructions" in refused(str(empty))


def test_options(tmp_path, capsys):
    assert "--top = 0: must be at least 1" in refused(str(PIECE), "--top", "0")
    assert "is not a known GPU; known are" in refused(str(PIECE), "--gpu", "h2000")
    where = str(tmp_path / "no" / "a.json")
    assert "which does not exist" in refused(str(PIECE), "--json", where)
    assert "is a folder, not a file" in refused(str(PIECE), "--json", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        call("profile", ["--help"])
    assert ended.value.code == exit_codes.EXIT_OK and "RUN_OR_TRACE" in capsys.readouterr().out
    assert "'--tpo': is not an option of python -m jaxpar.profile" in refused(
        str(PIECE), "--tpo", "3"
    )


def test_figures_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    words = [str(PIECE), "--gpu", "h200", "--json", str(file)]

    def full(*_):
        raise OSError(28, "No space left on device")

    for earlier in (None, "an earlier one"):
        if earlier is not None:
            file.write_text(earlier)
        with monkeypatch.context() as patch, pytest.raises(exit_codes.RunError) as error:
            patch.setattr(os, "replace", full)
            call("profile", words)
        assert str(error.value).startswith(f"--json = {str(file)!r}: cannot be written: No space")
        assert [path.read_text() for path in tmp_path.iterdir()] == ([earlier] if earlier else [])
    call("profile", words)
    assert json.loads(file.read_text())["path"] == str(PIECE)


def test_other_things_in_a_runs_profiles_are_passed_over(tmp_path):
    for name in ("step_00000012", "step_7", "notes"):
        (tmp_path / "profiles" / name).mkdir(parents=True)
    assert list(profile_folder.profiles_of(tmp_path)) == [12]
    (tmp_path / "profile.json").write_text('{"first_step": 3}')
    assert profile_folder.read_facts(tmp_path) is None


FACTS = {
    **{"first_step": 3, "num_steps": 2, "processes": 1, "devices": 2, "device_kind": "cpu"},
    **{"mesh": "data=2", "tokens": 64, "flops": 1e9, "attention_flops": None},
    **{"memory": {"temp_size_in_bytes": 1}, "versions": {}},
}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"devices": n} for n in (0, "2", True, 1.5, 10**400)),
        *({"num_steps": None}, {"flops": "many"}, {"flops": float("nan")}, {"mesh": 3}),
        *({"memory": [1]}, {"memory": {"temp_size_in_bytes": "1"}}, {"attention_flops": []}),
    ],
)
def test_damaged_facts_are_none(wrong, tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps(FACTS))
    assert profile_folder.read_facts(tmp_path) == profile_folder.ProfileFacts(**FACTS)
    (tmp_path / "profile.json").write_text(json.dumps(FACTS | wrong))
    assert profile_folder.read_facts(tmp_path) is None


@pytest.mark.parametrize(
    "data",
    [b"", gzip.compress(b"HloModule x\n"), b"\x1f\x8b", b"\xff\xfe", b"PK"],
    ids=["empty", "cut off", "no gzip", "no text", "short"],  # gzip's bytes have the time in them
)
def test_damaged_files_beside_a_trace_are_missing(data, tmp_path, capsys):
    shutil.copy(PIECE, tmp_path / "process_0.xplane.pb.gz")
    (tmp_path / "step.hlo.txt.gz").write_bytes(data)
    (tmp_path / "profile.json").write_text(json.dumps(FACTS | {"devices": 0}))
    call("profile", [str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "missing: profile.json: it is damaged" in said
    assert "missing: the HLO in step.hlo.txt.gz: the file " in said


# ------------------------------------------------------------------------- parts of it, by hand


def test_a_straggler():
    compute = {"0": 100.0, "1": 100.0, "2": 112.0, "3": 100.0}
    times = {n: {"compute": ms} for n, ms in compute.items()}
    found = sections.straggler({"devices_ms": times})
    assert found["device"] == "2" and found["over"] == pytest.approx(112 / 103 - 1)
    assert found["words"] == (
        "straggler: device 2 computes 8.7% longer than the mean, and the others wait"
    )


def test_a_plot_shows_the_least_of_values():
    lines = sections.area([0, 1, 40, 80], 80)
    assert lines == ["   █"] * 4 + ["  ██"] * 3 + [" ▁██"] and len(lines) == sections.HEIGHT


def test_rates_of_attention_and_model():
    profile = {
        "attention": {"flops": 1.2e14, "flops_per_second": 4.5e14},
        "model": {"flops": 6e14, "flops_per_second": 5.5e14, "mfu": 0.556},
    }
    assert sections.rates(profile, None).splitlines() == [
        "  attention: 120 TFLOP per step and device (causal, one document per sequence), "
        "450 TFLOP/s while its kernels run",
        "  model: 600 TFLOP per step and device (causal), 550 TFLOP/s over the step, MFU 55.6%",
    ]


HLO = """\
HloModule jit_step, is_scheduled=true, num_partitions=2

%sliced (p0: f32[8,128], p1: s32[]) -> f32[1,128] {
  %p0 = f32[8,128]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice.1 = f32[1,128]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,128}
}

%put (q0: f32[8,128], q1: f32[1,128]) -> f32[8,128] {
  %q0 = f32[8,128]{1,0} parameter(0)
  %q1 = f32[1,128]{1,0} parameter(1)
  ROOT %update.1 = f32[8,128]{1,0} dynamic-update-slice(%q0, %q1)
}

%product (r0: bf16[4,16], r1: bf16[16,32]) -> bf16[4,32] {
  %r0 = bf16[4,16]{1,0} parameter(0)
  %r1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,32]{1,0} dot(%r0, %r1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main {
  %a = f32[8,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[4,16]{1,0} parameter(2)
  %y = bf16[16,32]{1,0} parameter(3)
  %fusion.1 = f32[1,128]{1,0} fusion(%a, %i), kind=kLoop, calls=%sliced
  %fusion.2 = f32[8,128]{1,0} fusion(%a, %fusion.1), kind=kLoop, calls=%put
  %fusion.3 = bf16[4,32]{1,0} fusion(%x, %y), kind=kCustom, calls=%product
  %all-reduce.1 = f32[8,128]{1,0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%add
  %copy.1 = f32[8,128]{1,0} copy(%a)
  %gone = f32[8,128]{1,0} fusion(%elsewhere), kind=kLoop
  ROOT %custom-call.1 = bf16[4,32]{1,0} custom-call(%x), custom_call_target="mosaic_gpu"
}
"""


@pytest.mark.parametrize(
    ("name", "flops"), [("fusion.1", 0), ("fusion.3", 2 * 4 * 16 * 32), ("copy.1", 0), ("gone", 0)]
)
def test_flops_of_products(name, flops):
    module = hlo.parse(HLO)
    assert multiplications(module, module.instructions[name]) == flops


def test_a_cpus_instructions(tmp_path):
    def ran(op, start, end, device=0, run=7, module="jit_step"):
        stats = {"hlo_op": op, "hlo_module": module, "device_ordinal": device, "run_id": run}
        return Event(op, start, end - start, stats)

    one = [ran("fusion.3", 0, 10), Event("end: fusion.3", 10, 1), ran("all-reduce.1", 10, 30)]
    one += [ran("while.2", 30, 60), ran("fusion.1", 31, 59), ran("copy.1", 60, 62)]
    two = [ran("fusion.3", 100, 110, run=8), ran("fusion.3", 5, 30, device=1)]
    two.append(ran("fusion.9", 0, 40, module="jit_other"))
    path = write(tmp_path / "t.xplane.pb", {HOST: {"thread 1": one, "thread 2": two}})
    found = cpu_trace.read(trace.planes_of(path)[HOST])
    assert (found.module, found.on_gpu) == ("jit_step", False)
    names = {n: [[k.name for k in step] for step in steps] for n, steps in found.devices.items()}
    first = ["fusion.3", "all-reduce.1", "fusion.1", "copy.1"]
    assert names == {0: [first, ["fusion.3"]], 1: [["fusion.3"]]}
    known = cpu_trace.classify_instructions(found, hlo.parse(HLO)).devices[0][0]
    classes = [("matmul", ""), ("communication", "all-reduce"), ("fusion", ""), ("copy", "")]
    assert [(k.what, k.kind) for k in known] == classes
    with pytest.raises(trace.NoKernels, match="no device ran jit_third"):
        cpu_trace.read(trace.planes_of(path)[HOST], "jit_third")


def plan(sizes: dict[int, int], events: list[tuple[int, int, str, int]]):
    """A plan of memory: temporaries of some sizes, and (kind, buffer, instruction, shared with)."""
    made = xspace._classes()["BufferAssignment"]()
    for number, size in sizes.items():
        made.logical_buffers.add(id=number, size=size)
    made.buffer_allocations.add(size=100, is_entry_computation_parameter=True, maybe_live_out=True)
    made.buffer_allocations.add(size=8, maybe_live_out=True)
    made.buffer_allocations.add(size=4, is_constant=True)
    made.buffer_allocations.add(size=2, is_thread_local=True)
    block = made.buffer_allocations.add(size=64)
    for number in sizes:
        block.assigned.add(logical_buffer_id=number)
    simulated = made.heap_simulator_traces.add(whole_module_simulation=True)
    for kind, number, name, other in events:
        simulated.events.add(
            kind=kind, buffer_id=number, instruction_name=name, share_with_canonical_id=other
        )
    return made


def test_buffers_that_share_a_place_are_freed_with_the_last():
    events = [
        *[(0, 1, "fusion.1", 0), (0, 2, "fusion.2", 0), (2, 3, "fusion.3", 1)],
        *[(1, 1, "", 0), (0, 4, "copy.1", 0), (1, 3, "", 0), (1, 2, "", 0), (1, 4, "", 0)],
    ]
    found = memory.memory_of(plan({1: 10, 2: 20, 3: 10, 4: 25}, events), hlo.parse(HLO))
    assert [size for _, size in found.live] == [10, 30, 30, 30, 55, 45, 25, 0]
    assert found.peak == 55
    parts = (found.arguments, found.results, found.temporaries, found.constants)
    assert parts == (100, 8, 64, 4) and found.total == 176
    assert [(b.size, b.instruction, b.result) for b in found.at_peak] == [
        (25, "copy.1", "f32[8,128]"),
        (20, "fusion.2", "f32[8,128]"),
        (10, "fusion.1", "f32[1,128]"),
    ]
    assert memory.memory_of(xspace._classes()["BufferAssignment"]()) is None
