"""The marks of steps for NVIDIA's profilers."""

from types import SimpleNamespace

import pytest

from jaxpar.tools.bench import profiled


def test_marks_are_balanced(monkeypatch):
    calls: list[str] = []
    answer = lambda name: lambda *_: calls.append(name) or 0  # noqa: E731

    class Driver(SimpleNamespace):
        def __getattr__(self, name):
            return answer(name)

    monkeypatch.setattr(profiled.ctypes, "CDLL", lambda _: Driver())
    with pytest.raises(ValueError, match="in a step"), profiled.marked_for_nvidia():
        calls.append("step")
        raise ValueError("in a step")
    assert calls[calls.index("cuProfilerStart") :][:3] == [
        "cuProfilerStart",
        "step",
        "cuProfilerStop",
    ]
    assert calls.index("cuCtxPushCurrent_v2") < calls.index("cuProfilerStart")
