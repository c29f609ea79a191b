"""scripts/measure/recurrence_table.py, without a GPU."""

import pytest

from scripts.measure import interleaved
from scripts.measure import recurrence_table as measure


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["delta_rule", "state_space"])
def test_a_small_problem(rule, monkeypatch):
    monkeypatch.setattr(interleaved, "BATCH_SECONDS", 1e-3)
    monkeypatch.setattr(measure, "REPEATS", 1)
    small = measure.Problem(rule, 1, 40, 1, 2, 16, 32, 16, "float32")
    errors = measure.errors_of(small, "reference")
    assert {"out", "last", "d_q", "d_state"} <= errors.keys() and max(errors.values()) < 1e-6
    found = measure.measure(small, ("reference", "triton"))
    assert found["reference"].ms > 0 and "Hopper" in str(found["triton"])


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr("sys.argv", ["recurrence_table.py"])
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(SystemExit, match=r"nothing to measure on .*: it needs"):
        measure.main()
