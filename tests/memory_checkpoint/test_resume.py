"""Runs that fail go on from copies of their state in memory, with the bits of one that did not."""

import json
from pathlib import Path

import jax
import pytest

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.config import ConfigError
from jaxpar.memory_checkpoint import plan, writing
from jaxpar.memory_checkpoint.places import FOLDER, OWN, complete_files
from jaxpar.memory_checkpoint.slots import Slot
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.runtime import exit_codes
from tests import ranks
from tests.memory_checkpoint.hosts import folders_of
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

WORDS = """--train.num-steps 14 --train.log-every 1 --checkpoint.every 14 --evaluation.every 0
--optimizer.ema.decay 0.9""".split()
COPIES = ["--checkpoint.memory.every", "2"]


@pytest.fixture(scope="module")
def undisturbed(train_on, write_config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train_on(2, write_config(folder), *WORDS) == exit_codes.EXIT_OK
    return folder / "run"


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    """The folder of the only host."""
    (folder,) = folders_of(tmp_path / "memory", 1)
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


@pytest.fixture(autouse=True)
def steps_take_as_long_as_copies(monkeypatch) -> None:
    """So that none is skipped: a step of these runs takes milliseconds."""
    due = writing.MemoryCheckpointer.due

    def patient(self, step: int) -> bool:
        self.wait()
        return due(self, step)

    monkeypatch.setattr(writing.MemoryCheckpointer, "due", patient)


@pytest.fixture
def fails(monkeypatch):
    """(step) -> a device fails in this step, once."""

    def at(step: int) -> None:
        write_previous, done = MetricsWriter.write_previous, []

        def faulty(self, at, *measured):
            if at + 1 == step and not done:
                done.append(at)
                raise jax.errors.JaxRuntimeError("a fault of this test")
            write_previous(self, at, *measured)

        monkeypatch.setattr(MetricsWriter, "write_previous", faulty)

    return at


def steps_in(memory: Path) -> list[int]:
    return sorted(file.group.step for file in complete_files(memory))


def events_of(run: Path, name: str) -> list[dict]:
    lines = (run / "events.jsonl").read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.mark.parametrize("devices_then", [2, slow(4), slow(1)])
def test_a_run_that_failed_goes_on_from_memory(
    train_on, config_file, tmp_path, memory, fails, undisturbed, capsys, devices_then
):
    fails(10)
    with pytest.raises(jax.errors.JaxRuntimeError):
        train_on(2, config_file, *WORDS, *COPIES)
    run = tmp_path / "run"
    assert saved_steps(run) == []
    assert steps_in(memory) == [6, 8]
    capsys.readouterr()
    assert train_on(devices_then, config_file, *WORDS, *COPIES) == exit_codes.EXIT_OK
    said = capsys.readouterr().out
    assert "restored step 8 from memory in" in said
    assert "copied step 10 to memory: 0.001 GB, the loop waited 0." in said
    if devices_then == 2:
        ranks.assert_same_records(run, undisturbed)
    else:
        for step, (loss, norm) in ranks.losses_of(undisturbed).items():
            assert ranks.losses_of(run)[step] == pytest.approx((loss, norm), rel=1e-4)
    assert [e["step"] for e in events_of(run, "copied")] == [2, 4, 6, 8, 10, 12]
    # Nothing of the earlier attempt is left, and no more than two copies.
    assert steps_in(memory) == [10, 12]
    assert len(list((memory / OWN).iterdir())) == 2


def test_a_damaged_copy_is_passed_over(
    train_on, config_file, tmp_path, memory, fails, undisturbed, capfd
):
    fails(10)
    with pytest.raises(jax.errors.JaxRuntimeError):
        train_on(2, config_file, *WORDS, *COPIES)
    paths = complete_files(memory)
    (newest,) = paths[max(paths)]
    content = bytearray(newest.read_bytes())
    content[100] ^= 1
    newest.write_bytes(content)
    assert train_on(2, config_file, *WORDS, *COPIES) == exit_codes.EXIT_OK
    out, err = capfd.readouterr()
    assert f"block 0 of {newest} differs" in err
    assert "WARNING    the copy of step 8 in memory is damaged: a part of " in out
    assert "restored step 6 from memory" in out
    ranks.assert_same_records(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_copy_that_takes_too_long_or_fails_is_told_and_skipped(
    train_on, config_file, tmp_path, memory, monkeypatch, capfd
):
    complete, again = Slot.complete, []

    def failing(self, group, about):
        if group.step == 4:
            raise OSError(28, "No space left on device")
        return complete(self, group, about)

    any_of = writing._any_of

    def busy_once(flags):
        again.append(flags)
        return any_of([True, *flags[1:]] if len(again) == 4 else flags)

    monkeypatch.setattr(Slot, "complete", failing)
    monkeypatch.setattr(writing, "_any_of", busy_once)
    assert train_on(2, config_file, *WORDS, *COPIES) == exit_codes.EXIT_OK
    out, err = capfd.readouterr()
    assert "WARNING    the copy of step 4 in memory: [Errno 28] No space left" in err
    assert "no copy of step 8 in memory: the last one is still being written or sent" in out
    run = tmp_path / "run"
    assert [e["step"] for e in events_of(run, "copy failed")] == [4]
    assert [e["step"] for e in events_of(run, "copy skipped")] == [8]
    assert [e["step"] for e in events_of(run, "copied")] == [2, 6, 10, 12]
    assert steps_in(memory) == [10, 12]


def test_too_little_memory_and_no_launcher_end_the_run_before_it_starts(
    train_on, config_file, tmp_path, memory, monkeypatch, capsys
):
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 64_000)
    with pytest.raises(ConfigError) as error:
        train_on(2, config_file, *WORDS, *COPIES)
    said = str(error.value)
    assert "checkpoint.memory.every = 2: needs 0.00" in said and "which has 0.000 GB" in said
    assert "docker run --shm-size 2g" in said and "--checkpoint.memory None" in said
    monkeypatch.delenv(FOLDER)
    with pytest.raises(ConfigError, match="needs a launcher"):
        train_on(2, config_file, *WORDS, *COPIES)
    assert not (tmp_path / "run").exists()
