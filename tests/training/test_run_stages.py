"""What a run, and a replay, would say they do if it took long."""

from pathlib import Path

import pytest

from jaxpar.certification import replay
from jaxpar.runtime import exit_codes
from jaxpar.runtime.stages import Stage

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def entered(monkeypatch) -> list[str]:
    """The stages of this process, in order."""
    found: list[str] = []
    init, enter = Stage.__init__, Stage.enter

    def first(self: Stage, what: str, now: float) -> None:
        found.append(what)
        init(self, what, now)

    def next_one(self: Stage, what: str, *, ordinary: bool = False) -> None:
        found.append(what)
        enter(self, what, ordinary=ordinary)

    monkeypatch.setattr(Stage, "__init__", first)
    monkeypatch.setattr(Stage, "enter", next_one)
    return found


@pytest.mark.slow  # quicker: runtime/test_stages.py
def test_a_run_and_a_replay_have_stages(train_on, only_devices, config_file, entered):
    short = "--train.num-steps 6 --checkpoint.every 3 --evaluation.every 3".split()
    assert train_on(1, config_file, *short) == exit_codes.EXIT_OK
    beginning = """planning the layout
opening the data and checking the run
starting
testing the attention kernels
making the weights
compiling the train step
compiling the programs of evaluations and saves
waiting for the batch of step 1
step 1"""
    assert "\n".join(entered).startswith(beginning)
    assert {"evaluating after step 3", "waiting for the save of step 3"} <= set(entered)

    entered.clear()
    with only_devices(1):
        replay.replay(replay.ReplayOptions(run=str(Path(config_file).parent / "run"), step=5))
    assert entered[0] == "opening the run and its data"
    assert {"computing the state before step 5", "taking step 5 with batch 4"} <= set(entered)
