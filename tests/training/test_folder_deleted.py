"""A run whose folder, checkpoints or lock are deleted while it trains."""

import shutil
from pathlib import Path

import pytest

from jaxpar import checkpoint
from jaxpar.checkpoint import integrity
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import run_lock
from jaxpar.runtime.files.run_lock import FILE, RunLock, RunLocked
from tests.ranks import wait_for

SHORT = ["--train.num-steps", "12", "--checkpoint.every", "4", "--evaluation.every", "4"]


@pytest.fixture
def at_step(monkeypatch):
    """(step, what to do then): while its metrics are written. The lock is looked at often."""
    monkeypatch.setattr(run_lock, "LOOK_SECONDS", 0)
    write_previous = MetricsWriter.write_previous

    def register(at, act):
        def write(self, step, *measured):
            if step == at:
                act()
            write_previous(self, step, *measured)

        monkeypatch.setattr(MetricsWriter, "write_previous", write)

    return register


FILES = "metrics.jsonl events.jsonl recent.jsonl".split()


@pytest.mark.waits
def test_a_run_whose_folder_is_deleted_ends_with_one_error(config_file, train_on, at_step):
    run = Path(config_file).parent / "run"

    def delete():
        wait_for((run / "checkpoints" / "4" / integrity.FILES).exists)
        shutil.rmtree(run)

    at_step(6, delete)
    with pytest.raises(RunLocked, match=r"was deleted during the run.* Fix: start it again"):
        train_on(1, config_file, *SHORT)
    assert not run.exists()
    at_step(0, lambda: None)
    assert train_on(1, config_file, *SHORT) == exit_codes.EXIT_OK


@pytest.mark.waits
@pytest.mark.slow
def test_deleted_checkpoints_are_saved_again(config_file, train_on, at_step):
    run = Path(config_file).parent / "run"

    def delete():
        wait_for((run / "checkpoints" / "4" / integrity.FILES).exists)
        shutil.rmtree(run / "checkpoints")

    at_step(6, delete)
    assert train_on(1, config_file, *SHORT) == exit_codes.EXIT_OK
    assert checkpoint.saved_steps(run) == [8, 12]


def test_a_run_whose_lock_another_has_taken_writes_no_more(config_file, train_on, at_step):
    run, others, seen = Path(config_file).parent / "run", [], {}

    def take():
        (run / FILE).unlink()
        others.append(RunLock(run, 0))
        seen.update({name: (run / name).read_bytes() for name in FILES})

    at_step(6, take)
    with pytest.raises(RunLocked, match="stops without saving: another run may write"):
        train_on(1, config_file, *SHORT)
    others[0].check(at_once=True)
    others[0].release()
    assert checkpoint.saved_steps(run) == [4]
    after = {name: (run / name).read_bytes() for name in seen}
    added = {name: after[name].removeprefix(seen[name]).count(b"\n") for name in seen}
    assert max(added.values()) <= 1, added  # of the step that was running
