"""What restarts cost, from the events of a run."""

import pytest

from jaxpar.monitoring.goodput import read_events, restarts
from jaxpar.monitoring.recent_steps import RECENT_FILE, last_recorded
from tests.monitoring.test_goodput import TWO_ATTEMPTS, event


def test_restarts_cost_the_time_between_attempts_of_starting_and_of_repeated_steps():
    restored = event("restored", 2, 18, 1158, source="memory", step=20, seconds=3.5, repeated=10)
    found = restarts([*TWO_ATTEMPTS[:6], restored, *TWO_ATTEMPTS[6:]])
    assert found is not None
    starting = found.starting
    assert (found.count, found.down, found.repeated, found.repeated_steps) == (1, 40, 30, 10)
    assert found.seconds == pytest.approx(70 + starting) and starting > 0
    assert str(found).startswith(f"1 restart cost {found.seconds:.1f} s: starting {starting:.1f}")
    assert str(found).endswith("down 40.0, repeated steps 30.0 (10 steps); 1 from memory")
    assert restarts(TWO_ATTEMPTS[:4]) is None


def test_the_step_recorded_last_counts_not_the_largest(tmp_path):
    assert last_recorded(tmp_path) == 0
    line = '{"step": %d, "loss": 1.0, "grad_norm": 1.0, "bits": {"loss": "0", "grad_norm": "0"}}\n'
    (tmp_path / RECENT_FILE).write_text(line % 9 + line % 10 + line % 7 + '{"step": 8')
    assert last_recorded(tmp_path) == 7
    bad = '{"event": "restored", "attempt": 1, "age": 1, "time": 1, "source": "memory"}\n'
    (tmp_path / "events.jsonl").write_text(bad)
    assert read_events(tmp_path) == []
