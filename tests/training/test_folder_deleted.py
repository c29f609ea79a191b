"""A run whose folder, files or lock are deleted while it trains."""

import json
import shutil
from pathlib import Path

import pytest

from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.saved import saved_steps
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import append, lock
from jaxpar.runtime.files.lock import FILE, RunLock, RunLocked
from tests.ranks import wait_for
from tests.slow import slow

SHORT = ["--train.num-steps", "12", "--checkpoint.every", "4", "--evaluation.every", "4"]


@pytest.fixture
def at_step(monkeypatch):
    """(step, what to do then): while the step's metrics are written. Files are looked at often."""
    monkeypatch.setattr(append, "LOOK_SECONDS", 0)
    monkeypatch.setattr(lock, "LOOK_SECONDS", 0)
    write_previous = MetricsWriter.write_previous

    def register(at, act):
        def write(self, step, *measured):
            if step == at:
                act()
            write_previous(self, step, *measured)

        monkeypatch.setattr(MetricsWriter, "write_previous", write)

    return register


FILES = "config.json manifest.json metrics.jsonl events.jsonl recent.jsonl lock".split()


@pytest.mark.waits
@pytest.mark.parametrize("what", ["the folder", slow("its files"), slow("its checkpoints")])
def test_what_is_deleted_is_written_again(what, config_file, train_on, at_step, capfd):
    run = Path(config_file).parent / "run"

    def delete():
        wait_for((run / "checkpoints" / "4" / integrity.FILES).exists)
        if what == "its files":
            for name in FILES:
                (run / name).unlink()
        else:
            shutil.rmtree(run if what == "the folder" else run / "checkpoints")

    at_step(6, delete)
    assert train_on(1, config_file, *SHORT) == exit_codes.EXIT_OK
    assert saved_steps(run) == ([4, 8, 12] if what == "its files" else [8, 12])
    assert {path.name for path in run.iterdir()} >= {*FILES, "checkpoints"}
    json.loads((run / "config.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert "was deleted during the run" in capfd.readouterr().err or what == "its checkpoints"
    assert train_on(1, config_file, *SHORT) == exit_codes.EXIT_OK
    assert "already done" in capfd.readouterr().out


def test_a_run_whose_lock_another_has_taken_writes_no_more(config_file, train_on, at_step):
    run, others, seen = Path(config_file).parent / "run", [], {}

    def take():
        (run / FILE).unlink()
        others.append(RunLock(run, 0))
        seen.update({name: (run / name).read_bytes() for name in FILES[2:]})

    at_step(6, take)
    with pytest.raises(RunLocked, match="stops without saving, so that only one writes"):
        train_on(1, config_file, *SHORT)
    others[0].check(at_once=True)
    others[0].release()
    assert saved_steps(run) == [4]
    after = {name: (run / name).read_bytes() for name in seen}
    added = {name: after[name].removeprefix(seen[name]).count(b"\n") for name in seen}
    assert max(added.values()) <= 1, added  # of the step that was running
