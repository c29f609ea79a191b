"""An exception that leaves the devices alive ends a run after its last step has been saved."""

import random

import jax
import pytest

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.memory_checkpoint.places import FOLDER, complete_files
from jaxpar.runtime import exit_codes
from jaxpar.training.callbacks import saves
from jaxpar.training.callbacks.callback import Progress
from jaxpar.training.callbacks.checks import Evaluations, StopRequests
from jaxpar.training.callbacks.saves import Checkpoints
from jaxpar.training.callbacks.steps import Compilation
from jaxpar.training.step_guard import StepGuard
from tests import ranks
from tests.memory_checkpoint.hosts import folders_of
from tests.memory_checkpoint.test_resume import WORDS, undisturbed
from tests.slow import slow_but

__all__ = ["undisturbed"]

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

#: Where a run may fail, and how to tell the step there.
PLACES = {
    "before a step": (Compilation, "before_step", lambda at, batch: at.step + 1),
    "a callback": (Compilation, "after_step", lambda at: at.step),
    "after a step": (StopRequests, "after_step", lambda at: at.step),
    "evaluation": (Evaluations, "after_step", lambda at: at.step),
}


class Fault(Exception):
    """Of these tests."""


@pytest.fixture
def fails(monkeypatch):
    """(place, step, error) -> that is raised there, each time."""

    def at(place: str, step: int, error: Exception) -> None:
        of, name, step_of = PLACES[place]
        method = getattr(of, name)

        def faulty(self, *args, **more):
            if step_of(*args) == step:
                raise error
            return method(self, *args, **more)

        monkeypatch.setattr(of, name, faulty)

    return at


@pytest.mark.parametrize("place", slow_but(["before a step"], PLACES))
def test_a_fault_at_a_random_step_loses_no_step(
    train_on, config_file, tmp_path, fails, monkeypatch, undisturbed, capsys, place
):
    step = random.Random(place).randint(3, 12)
    fails(place, step, Fault("of this test"))
    with pytest.raises(Fault):
        train_on(2, config_file, *WORDS)
    run = tmp_path / "run"
    done = step - 1 if place == "before a step" else step
    assert saved_steps(run) == [done]
    assert f"Fault: step {done} is saved before the run ends" in capsys.readouterr().out
    monkeypatch.undo()
    assert train_on(2, config_file, *WORDS) == exit_codes.EXIT_OK
    ranks.assert_same_records(run, undisturbed)


def test_with_copies_in_memory_the_first_time_is_saved_there_and_the_second_on_disk(
    train_on, config_file, tmp_path, fails, monkeypatch, capsys
):
    (memory,) = folders_of(tmp_path / "memory", 1)
    monkeypatch.setenv(FOLDER, str(memory))
    words = (*WORDS, "--checkpoint.memory.every", "5")
    fails("before a step", 9, Fault("of this test"))
    run = tmp_path / "run"
    for saved, on_disk in ((8, []), (8, [8])):
        with pytest.raises(Fault):
            train_on(2, config_file, *words)
        assert max(file.group.step for file in complete_files(memory)) == saved
        assert saved_steps(run) == on_disk
    assert "restored step 8 from memory" in capsys.readouterr().out


@pytest.mark.slow
def test_bad_numbers_failed_devices_and_no_new_step_save_nothing(
    train_on, config_file, tmp_path, fails, monkeypatch
):
    run = tmp_path / "run"
    fails("before a step", 1, Fault("before the first step"))
    with pytest.raises(Fault):
        train_on(2, config_file, *WORDS)
    for error in (jax.errors.JaxRuntimeError("a device"), exit_codes.BadNumerics("a loss")):
        monkeypatch.undo()
        fails("before a step", 5, error)
        with pytest.raises(type(error)):
            train_on(2, config_file, *WORDS)
    # The numbers of the last step are checked before it is saved.
    monkeypatch.undo()
    look = StepGuard.look

    def bad(self, step, values):
        if step == 3:
            raise exit_codes.BadNumerics("a loss")
        look(self, step, values)

    monkeypatch.setattr(StepGuard, "look", bad)
    fails("before a step", 5, Fault("while step 4 is computed"))
    with pytest.raises(Fault):
        train_on(2, config_file, *WORDS)
    assert saved_steps(run) == []


@pytest.mark.waits
@pytest.mark.slow
def test_a_save_that_fails_or_hangs_ends_the_run_by_the_first_error(
    train_on, config_file, tmp_path, fails, monkeypatch, capfd
):
    fails("before a step", 5, Fault("of this test"))
    save_now = Checkpoints.save_now

    def failing(self, *args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save_now", failing)
    with pytest.raises(Fault):
        train_on(2, config_file, *WORDS)
    assert "step 4 could not be saved: OSError: [Errno 28] No space left" in capfd.readouterr().err
    assert saved_steps(tmp_path / "run") == []
    ended = []
    monkeypatch.setattr(saves, "end_with", ended.append)
    monkeypatch.setattr(saves, "SAVE_SECONDS", 0.5)

    def slow(self, *args, **more):
        ranks.wait_for(lambda: ended)
        save_now(self, *args, **more)

    monkeypatch.setattr(Checkpoints, "save_now", slow)
    with pytest.raises(Fault):
        train_on(2, config_file, *WORDS, "--cluster.hang-seconds", "0")
    assert [type(error) for error in ended] == [Fault]


def test_one_of_several_processes_that_fails_alone_does_not_save(monkeypatch):
    of_run = {"config": None, "mesh": None, "folder": None, "last_step": 9}
    at = Progress(**of_run, step=7, state=[jax.numpy.zeros(2)])
    for said, alike in ((["7 True"] * 2, True), (["7 True", "6 True"], False), (None, False)):

        def exchange(name, mine, seconds, said=said):
            assert mine == "7 True" and seconds == saves.AGREE_SECONDS
            if said is None:
                raise saves.peers.PeersMissing("process 1")
            return said

        monkeypatch.setattr(saves.peers, "exchange", exchange)
        assert saves.all_fail_at(at) == alike
    at.state[0].delete()

    def deleted(name, mine, seconds):
        assert mine == "7 False"
        return [mine]

    monkeypatch.setattr(saves.peers, "exchange", deleted)
    assert not saves.all_fail_at(at)
