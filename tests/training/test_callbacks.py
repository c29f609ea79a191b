"""Callbacks of users: they stop a run, add metrics, ask for saves, and keep a state."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar import Callback, Progress, Request
from jaxpar.api.trainer import Trainer
from jaxpar.checkpoint.saved import read_saved, saved_steps
from jaxpar.config import ConfigError, replace
from jaxpar.config.command_line import read_config
from jaxpar.memory_checkpoint.places import FOLDER
from jaxpar.memory_checkpoint.writing import MemoryCheckpointer
from jaxpar.runtime import exit_codes
from jaxpar.training.callbacks import own
from tests import ranks
from tests.memory_checkpoint.hosts import folders_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

#: What the tests' config file begins with, in place of a folder of the user.
CODE = '''
import jaxpar


class StopBelow(jaxpar.Callback):
    """Ends the run when the mean loss is low enough."""

    loss: float
    share: float = 0.5

    def prepare(self, run):
        return {"mean": float("inf"), "seen": []}

    def after_step(self, run, own):
        loss = float(run.metrics["loss"])
        first = own["mean"] == float("inf")
        own["mean"] = loss if first else own["mean"] + self.share * (loss - own["mean"])
        own["seen"].append(run.step)
        metrics = {"mean_loss": own["mean"], "twice": 2 * run.metrics["loss"]}
        stop = f"mean {own['mean']:.4f}" if own["mean"] < self.loss else ""
        return jaxpar.Request(stop=stop, metrics=metrics)


class SaveAt(jaxpar.Callback):
    """Asks for a checkpoint after a step."""

    step: int

    def after_step(self, run, own):
        return jaxpar.Request(save=run.step == self.step)


class Fails(jaxpar.Callback):
    """Fails as a device does: nothing is saved."""

    step: int

    def after_step(self, run, own):
        if run.step == self.step:
            import jax
            raise jax.errors.JaxRuntimeError("a fault of this test")
'''
WORDS = "--train.num-steps 12 --checkpoint.every 4 --evaluation.every 6".split()


@pytest.fixture
def config_with(config_file):
    """(callbacks, as Python) -> a config file with them."""

    def made(callbacks: str) -> str:
        text = plain.replace("log_every=1", f"log_every=1, callbacks=({callbacks})")
        Path(config_file).write_text(CODE + text, "utf-8")
        return config_file

    plain = Path(config_file).read_text("utf-8")
    return made


def records(run: Path) -> dict[int, dict]:
    return {r["step"]: r for r in jaxpar.read_metrics(run) if "loss" in r}


def test_it_stops_a_run_of_the_command_and_adds_metrics(train_on, config_with, tmp_path, capsys):
    file, run = config_with("StopBelow(loss=5.3),"), tmp_path / "run"
    assert train_on(2, file, *WORDS) == exit_codes.EXIT_OK
    found = records(run)
    last = max(found)
    assert 1 < last < 12
    means = [record["mean_loss"] for record in found.values()]
    assert means[-1] < 5.3 <= min(means[:-1])
    assert f"done: {run}, stopped early: StopBelow: mean {means[-1]:.4f}" in capsys.readouterr().out
    # As after the last step: it is evaluated and saved.
    assert saved_steps(run)[-1] == last
    evaluated = [r["step"] for r in jaxpar.read_metrics(run) if "held_out_loss" in r]
    assert evaluated[-1] == last
    for record in found.values():
        assert record["twice"] == float(np.float32(2) * np.float32(record["loss"]))
    saved = json.loads((run / "config.json").read_text("utf-8"))["train"]["callbacks"]
    (named,) = saved
    assert named.pop("class").endswith(":StopBelow")
    assert named == {"key": "", "loss": 5.3, "share": 0.5}


@pytest.mark.slow  # quicker: bit for bit, below
def test_state_is_kept_over_a_kill_and_a_resume_on_another_mesh(
    train_on, config_with, tmp_path, capsys
):
    run, forever = tmp_path / "run", "StopBelow(loss=0.0), SaveAt(step=6),"
    whole = ["--run.dir", str(tmp_path / "whole")]
    assert train_on(2, config_with(forever), *WORDS, *whole) == exit_codes.EXIT_OK
    with pytest.raises(jax.errors.JaxRuntimeError):
        train_on(2, config_with(forever + "Fails(step=7),"), *WORDS)
    assert saved_steps(run) == [4, 6]  # one of them because it was asked for
    kept = json.loads(read_saved(run, 6).callbacks["StopBelow"])
    assert kept["seen"] == [1, 2, 3, 4, 5, 6]
    mesh = ["--parallel.tensor", "2"]
    assert train_on(4, config_with(forever), *WORDS, *mesh) == exit_codes.EXIT_OK
    assert "restored step 6" in capsys.readouterr().out
    kept, of_whole = (
        json.loads(read_saved(folder, 12).callbacks["StopBelow"])
        for folder in (run, tmp_path / "whole")
    )
    assert kept["seen"] == of_whole["seen"] == list(range(1, 13))
    assert kept["mean"] == pytest.approx(of_whole["mean"], rel=1e-5)
    assert records(run)[12]["mean_loss"] == kept["mean"]


def test_a_killed_run_resumes_bit_for_bit(train_on, config_with, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    callbacks = "StopBelow(loss=0.0),"
    assert train_on(2, config_with(callbacks), *WORDS, "--run.dir", str(whole)) == 0
    with pytest.raises(jax.errors.JaxRuntimeError):
        train_on(2, config_with(callbacks + "Fails(step=10),"), *WORDS)
    assert train_on(2, config_with(callbacks), *WORDS) == exit_codes.EXIT_OK
    ranks.assert_same_records(run, whole)
    both = [read_saved(folder, 12) for folder in (run, whole)]
    assert both[0].callbacks == both[1].callbacks and both[0].callbacks
    assert both[0].fingerprints == both[1].fingerprints


def test_a_copy_in_memory_has_its_state(train_on, config_with, tmp_path, monkeypatch, capsys):
    (memory,) = folders_of(tmp_path / "memory", 1)
    monkeypatch.setenv(FOLDER, str(memory))
    due = MemoryCheckpointer.due

    def patient(self, step: int) -> bool:  # a step takes as long as a copy: none is left out
        self.wait()
        return due(self, step)

    monkeypatch.setattr(MemoryCheckpointer, "due", patient)
    words = [*WORDS, "--checkpoint.every", "12", "--checkpoint.memory.every", "3"]
    forever = "StopBelow(loss=0.0),"
    with pytest.raises(jax.errors.JaxRuntimeError):
        train_on(2, config_with(forever + "Fails(step=8),"), *words)
    assert train_on(2, config_with(forever), *words) == exit_codes.EXIT_OK
    assert "restored step 6 from memory" in capsys.readouterr().out
    kept = json.loads(read_saved(tmp_path / "run").callbacks["StopBelow"])
    assert kept["seen"] == list(range(1, 13))


@pytest.mark.slow
def test_one_that_is_gone_is_named(train_on, config_with, capsys):
    short = [*WORDS, "--train.num-steps", "4"]
    assert train_on(2, config_with("StopBelow(loss=0.0, key='low'),"), *short) == 0
    capsys.readouterr()
    assert train_on(2, config_with("SaveAt(step=5),"), *WORDS) == exit_codes.EXIT_OK
    said = capsys.readouterr().out
    assert said.count("callback   low is gone: its state of step 4 is not used\n") == 1


def test_two_of_one_key_are_refused(train_on, config_with):
    for two in (
        "SaveAt(step=1), SaveAt(step=2),",
        "SaveAt(step=1), StopBelow(loss=1, key='SaveAt'),",
    ):
        with pytest.raises(ConfigError) as refused:
            train_on(1, config_with(two))
        said = "train.callbacks = 'SaveAt': is the key of 2 callbacks, whose state a checkpoint has"
        assert said in str(refused.value) and "Fix: give each its own" in str(refused.value)
    own.check(read_config([config_with("SaveAt(step=1), SaveAt(step=2, key='later'),")]))


class Function(Callback):
    """Has an option that no file can have."""

    call: object


def test_an_option_that_is_a_function_is_refused(config_file):
    cfg = replace(read_config([config_file]), **{"train.callbacks": (Function(call=print),)})
    with pytest.raises(ConfigError, match=r"Function\.call = .*: is no option"):
        own.check(cfg)


@pytest.mark.slow
def test_a_run_folder_goes_on_with_its_code(train_on, config_with, tmp_path):
    file, more = config_with("SaveAt(step=2),"), ["--train.num-steps", "8"]
    words = [*WORDS, "--train.num-steps", "4"]
    assert train_on(2, file, *words) == exit_codes.EXIT_OK
    with pytest.raises(ConfigError, match=r"'tiny.py:SaveAt': is of a class whose code is not"):
        train_on(2, str(tmp_path / "run"), *more)
    assert train_on(2, str(tmp_path / "run"), "--code", file, *more) == exit_codes.EXIT_OK
    assert saved_steps(tmp_path / "run")[-1] == 8


# ------------------------------------------------------------------------ in Python

CALLS: list[tuple] = []


class Notes(Callback):
    """Notes what is called, with the step."""

    def prepare(self, run: Progress):
        CALLS.append(("prepare", run.step))
        return {}

    def before_step(self, run, own, batch):
        CALLS.append(("before_step", run.step))
        assert batch.tokens.shape == (8, 32)

    def after_step(self, run, own):
        CALLS.append(("after_step", run.step))
        own["last"] = run.step
        assert int(run.state.step) == run.step and run.last_step == 4

    def evaluate(self, run, own, losses):
        CALLS.append(("evaluate", run.step))
        return Request(metrics={"perplexity": np.exp(losses["held_out_loss"])})

    def save(self, run, own):
        CALLS.append(("save", run.step))
        return own

    def restore(self, run, own, saved):
        CALLS.append(("restore", run.step))
        return own | saved

    def close(self, run, own, error):
        CALLS.append(("close", run.step, error))


@pytest.fixture
def trainer_of(config_file, only_devices):
    """(overrides) -> a trainer of the tests' tiny config on two devices."""
    fields = {"train.num_steps": 4, "evaluation.every": 4, "checkpoint.every": 2}
    with only_devices(2):
        yield lambda **more: Trainer(jaxpar.load_config(config_file, fields | more))


def test_all_hooks_in_order(trainer_of, tmp_path):
    CALLS.clear()
    assert trainer_of().train(Notes())
    steps = [(name, step + (name == "after_step")) for step in range(4) for name in STEP_HOOKS]
    once = [("prepare", 0), ("save", 0)]  # a state that is no JSON is refused at the start
    assert [
        *once, *steps[:4], ("save", 2), *steps[4:], ("evaluate", 4), ("save", 4), ("close", 4, None)
    ] == CALLS  # fmt: skip
    (record,) = [r for r in jaxpar.read_metrics(tmp_path / "run") if "held_out_loss" in r]
    assert record["perplexity"] == pytest.approx(np.exp(record["held_out_loss"]))
    assert json.loads(read_saved(tmp_path / "run").callbacks["Notes"]) == {"last": 4}


STEP_HOOKS = "before_step", "after_step"


class Wrong(Callback):
    """Does what is refused."""

    how: str

    def prepare(self, run):
        return {"x": jax.numpy.zeros(3)} if self.how == "array" else {}

    def after_step(self, run, own):
        if self.how == "error" and run.step == 3:
            raise ZeroDivisionError
        if self.how == "error":
            return None
        if self.how == "text":
            return "stop"
        return Request(metrics={self.how: 1.0})


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("array", exit_codes.RunError, "the state of Wrong: .*Fix: keep numbers"),
        ("text", ConfigError, "Wrong.after_step = 'stop': must return a jaxpar.Request or None"),
        ("loss", ConfigError, 'Wrong.* = .loss.: is the name of another metric.*"Wrong_loss"'),
        ("learning_rate", ConfigError, "is the name of another metric"),
    ],
)
def test_what_is_refused(trainer_of, how, kind, said):
    with pytest.raises(kind, match=said):
        trainer_of().train(Wrong(how=how))


def test_the_step_before_its_error_is_recorded_and_saved(trainer_of, tmp_path):
    with pytest.raises(ZeroDivisionError):
        trainer_of().train(Wrong(how="error"))
    assert saved_steps(tmp_path / "run") == [2, 3]
    assert sorted(records(tmp_path / "run")) == [1, 2, 3]
    assert trainer_of().train(Wrong(how="error", key="other"))
    assert sorted(records(tmp_path / "run")) == [1, 2, 3, 4]


def test_it_goes_back_with_the_run(trainer_of, tmp_path, monkeypatch):
    """After a loss spike, its state is that of the checkpoint."""
    from jaxpar.training.step_guard import StepGuard

    look, spikes = StepGuard.look, []

    def spike(self, step, values):
        if step == 2 and not spikes:
            spikes.append(step)
            raise exit_codes.Spike(step, "a spike of this test")
        look(self, step, values)

    monkeypatch.setattr(StepGuard, "look", spike)
    CALLS.clear()
    assert trainer_of(**{"evaluation.every": 0}).train(Notes())
    names = [call[0] for call in CALLS]
    assert names.count("prepare") == 2 and names.count("close") == 2
    assert ("restore", 2) in CALLS
    assert isinstance(CALLS[names.index("close")][2], exit_codes.Spike)


def test_processes_agree(monkeypatch):
    """A request of one process is followed by all at a step that none has reached."""
    cfg = replace(jaxpar.load_config("quickstart"), **{"train.log_every": 5})
    of_run = {"config": cfg, "mesh": None, "folder": None, "last_step": 100, "state": None}
    texts: dict[int, str] = {}
    monkeypatch.setattr(own.peers, "world_size", lambda: 2)
    monkeypatch.setattr(own.peers, "read_published", lambda topic: texts)
    monkeypatch.setattr(own.peers, "publish", lambda topic, text: texts.update({1: text}))
    one, other = (own.Requests(lambda metrics: None) for _ in range(2))
    at = Progress(**of_run, step=8)
    asked = Request(save=True, metrics={"x": 1})
    assert one.add(at, "A", asked).request == Request(metrics={"x": 1})
    one.add(Progress(**of_run, step=9), "A", Request(stop="enough"))
    for requests in (one, other):
        found = {}
        for step in range(8, 21):
            after = requests.after_step(Progress(**of_run, step=step))
            if after.request != Request():
                found[step] = after.request.save, after.request.stop, after.ends
        assert found == {15: (True, "A: enough", True)}


@pytest.mark.slow  # quicker: what processes agree on, above
@pytest.mark.waits
def test_processes_end_after_the_same_step(write_ranks, tmp_path):
    """One of two asks to stop. The checkpoint has the state of process 0."""
    file = Path(write_ranks(tmp_path))
    text = file.read_text("utf-8").replace("log_every=1", "log_every=2, callbacks=(Alone(),)")
    file.write_text(ALONE + text, "utf-8")
    launched = ranks.launch(2, 1, "--", str(file), "--evaluation.every", "0")
    code, said = ranks.finish(launched)
    assert code == exit_codes.EXIT_OK, said
    run = tmp_path / "run"
    saved = saved_steps(run)
    assert "stopped early: Alone: process 1 has had enough" in said
    last = saved[-1]
    assert last == 14 and 8 in saved  # asked for after steps 10 and 4
    kept = read_saved(run, last).callbacks
    assert json.loads(kept["Alone"]) == {"process": 0, "steps": last}


ALONE = '''
import jax
import jaxpar


class Alone(jaxpar.Callback):
    """One of the processes asks."""

    def prepare(self, run):
        return {"process": jax.process_index()}

    def after_step(self, run, own):
        own["steps"] = run.step
        if jax.process_index() == 1:
            stop = "process 1 has had enough" if run.step == 10 else ""
            return jaxpar.Request(stop=stop, save=run.step == 4)
'''
