"""Reading a trace: which lines count, which step a kernel belongs to, what is said without one."""

import pytest

from jaxpar.monitoring.profiler import capture
from jaxpar.tools.profiling.trace import read as trace
from tests.tools.profiling.xspace import HOST, Event, launches, write

MODULE = "jit_train_step"


def kernel(what, start, duration, launch, module=MODULE, **stats):
    """An event on a stream."""
    return Event(what, start, duration, {"correlation_id": launch, "hlo_module": module, **stats})


def two_steps(number=0):
    """A device that runs each step after the next is launched."""
    stream = [kernel("a", 100, 5, 10), kernel("b", 110, 5, 11), kernel("a", 130, 5, 20)]
    other = [kernel("nccl", 112, 30, 12), kernel("b", 150, 9, 21)]
    runs = [(0, 20, (10, 11, 12)), (40, 20, (20, 21))]
    device = {"Stream #5(Compute)": stream, "Stream #9(Compute)": other}
    return {f"/device:GPU:{number}": device, HOST: {"main": launches(number, MODULE, runs)}}


def names(steps):
    """The kernels of each step."""
    return [[k.name for k in step] for step in steps]


def test_kernels_belong_to_the_step_that_launched_them(tmp_path):
    found = trace.read(write(tmp_path / "t.xplane.pb", two_steps()))
    assert found.module == MODULE
    assert names(found.devices[0]) == [["a", "b", "nccl"], ["a", "b"]]
    first = found.devices[0][0][0]
    assert (first.start, first.end, first.stream) == (100, 105, "Stream #5")


def test_derived_lines_and_other_modules_do_not_count(tmp_path):
    planes = two_steps(number=3)
    device = planes["/device:GPU:3"]
    device["XLA Ops"] = [kernel("a", 100, 50, 10)]
    device["Steps"] = [kernel("0", 100, 50, 10)]
    device["Stream #1(MemcpyD2H)"] = [
        Event("MemcpyD2H", 90, 900, {"correlation_id": 9}),
        kernel("x", 0, 1, 1, "jit_init"),
    ]
    planes["/device:CUSTOM:0"] = device
    path = write(tmp_path / "t.xplane.pb", planes)
    assert names(trace.read(path).devices[3]) == [["a", "b", "nccl"], ["a", "b"]]
    assert trace.read(path, MODULE) == trace.read(path)


def test_a_kernel_launched_before_the_trace_is_no_steps(tmp_path):
    planes = two_steps()
    planes["/device:GPU:0"]["Stream #5(Compute)"].insert(0, kernel("z", 10, 5, 4))
    found = trace.read(write(tmp_path / "t.xplane.pb", planes))
    assert names(found.devices[0])[0] == ["a", "b", "nccl"]


def test_command_buffers_hide_the_instruction(tmp_path):
    planes = two_steps()
    planes["/device:GPU:0"]["Stream #5(Compute)"] = [
        kernel("a", 1, 1, 10, hlo_op="fusion.1", name="jit(f)/add"),
        kernel("b", 2, 1, 11, hlo_op="command_buffer_4"),
    ]
    known, hidden, _ = trace.read(write(tmp_path / "t.xplane.pb", planes)).devices[0][0]
    assert (known.op, known.scope) == ("fusion.1", "jit(f)/add")
    assert (hidden.op, hidden.scope) == ("", "")


def without_host(planes):
    del planes[HOST]


def without_gpu(planes):
    del planes["/device:GPU:0"]


def of_another_device(planes):
    planes[HOST] = {"main": launches(7, MODULE, [(0, 20, (10,))])}


def without_modules(planes):
    planes["/device:GPU:0"] = {"Stream #1(MemcpyD2H)": [Event("MemcpyD2H", 0, 9)]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without_gpu, "no GPU plane"),
        (without_host, "no execution of jit_train_step on GPU 0"),
        (of_another_device, "no execution of jit_train_step on GPU 0"),
        (without_modules, "belongs to an XLA module"),
    ],
)
def test_what_is_missing_is_said(tmp_path, change, why):
    planes = two_steps()
    change(planes)
    with pytest.raises(trace.NoKernels, match=why):
        trace.read(write(tmp_path / "t.xplane.pb", planes))


def test_an_unknown_module_and_an_empty_folder(tmp_path):
    path = write(tmp_path / "runs" / "t.xplane.pb", two_steps())
    with pytest.raises(trace.NoKernels, match="no GPU ran jit_other"):
        trace.read(path, "jit_other")
    assert trace.newest_file(tmp_path) == path
    (tmp_path / "empty").mkdir()
    with pytest.raises(trace.NoKernels, match="below"):
        trace.newest_file(tmp_path / "empty")


def test_a_trace_taken_here_has_no_gpu(tmp_path):
    with capture(tmp_path):
        pass
    with pytest.raises(trace.NoKernels, match="no GPU plane"):
        trace.read(trace.newest_file(tmp_path))


def test_the_real_piece(real_trace):
    found = trace.read(real_trace)
    assert found.module == MODULE and sorted(found.devices) == [0, 1]
    for steps in found.devices.values():
        assert [len(step) for step in steps] == [105, 105]
        assert all(k.start < k.end for step in steps for k in step)
