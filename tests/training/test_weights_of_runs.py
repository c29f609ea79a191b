"""Weights of other runs: chosen once, recorded in checkpoints, and required when a run resumes."""

import dataclasses
import json
import shlex
import shutil

import numpy as np
import pytest

from jaxpar.checkpoint import saved as reader
from jaxpar.checkpoint.branching import branch
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.saved import read_saved
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.config.values import to_values
from jaxpar.features.distillation import FIELD as TEACHER
from jaxpar.features.distillation import cache, teacher
from jaxpar.features.dpo import reference
from jaxpar.runtime.processes import peers
from jaxpar.step.state import init_state
from jaxpar.training import chosen, initial_weights
from jaxpar.training.chosen import INITIAL, Chosen, choose
from jaxpar.training.run import Run


@pytest.fixture
def other(finished, tmp_path):
    """A run that goes on: it has step 40, and `goes_on` gives it the later ones."""
    folder = tmp_path / "other"
    shutil.copytree(finished, folder)
    goes_on(folder, finished, 40)
    return folder


def goes_on(folder, finished, *steps):
    """Give a run these checkpoints alone."""
    shutil.rmtree(folder / "checkpoints")
    for step in steps:
        name = f"checkpoints/{step}"
        shutil.copytree(finished / name, folder / name)


@pytest.fixture
def config(write_config, tmp_path):
    """(flags) -> a config of a run that takes weights from another."""
    file = write_config(tmp_path)
    return lambda *flags: read_config([file, *map(str, flags)])


def saved_with(cfg, finished, weights_from):
    """The metadata of a checkpoint that records some weights."""
    return dataclasses.replace(
        read_saved(finished, 40),
        config=to_values(cfg),
        weights_from=weights_from,
    )


@pytest.mark.parametrize("field", [TEACHER, INITIAL])
def test_a_new_run_takes_the_newest_and_a_resumed_one_the_same(field, config, other, finished):
    cfg = config(f"--{field}", other)
    first = choose(cfg, None)
    assert first[field].step == 40 and first[field].run == str(other)
    saved = saved_with(cfg, finished, json.loads(json.dumps(chosen.to_json(first))))
    goes_on(other, finished, 40, 80, 120)
    assert choose(cfg, None)[field].step == 120
    assert choose(cfg, saved) == first
    if field == INITIAL:
        assert chosen.initial_again(cfg, saved) == first
    assert first[field].weights not in [chosen.digest(other, step) for step in (80, 120)]


@pytest.mark.parametrize("field", [TEACHER, INITIAL])
def test_weights_that_are_gone_end_in_one_error_whose_fix_works(
    field, config, other, finished, tmp_path, only_devices
):
    cfg = config(f"--{field}", other)
    saved = saved_with(cfg, finished, chosen.to_json(choose(cfg, None)))
    again = choose if field == TEACHER else chosen.initial_again
    goes_on(other, finished, 80, 120)
    with pytest.raises(ConfigError, match=rf"{field} = .*other, step 40: there are 80, 120") as no:
        again(cfg, saved)
    shutil.copytree(finished, cfg.run.dir)  # the run that cannot resume
    flags = [word for word in shlex.split(no.value.fix.partition("one: ")[2])]
    assert flags[::2] == ["--run.dir", "--run.init-from"] and flags[3] == cfg.run.dir
    with only_devices(2):
        run = Run.open(config(f"--{field}", other, *flags))
    assert run.first_step is None and run.origin.folder.name == "run"
    # The other fix: the checkpoint comes back, here in a copy of the run at another place.
    moved = tmp_path / "moved"
    branch(str(finished), str(moved), 40, lambda text: None)
    found = again(config(f"--{field}", moved), saved)[field]
    assert (found.run, found.step) == (str(moved), 40)


def test_a_step_with_other_weights_is_not_the_same(config, other, finished):
    cfg = config(f"--{TEACHER}", other)
    saved = saved_with(cfg, finished, chosen.to_json(choose(cfg, None)))
    steps = other / "checkpoints"
    shutil.rmtree(steps / "40")
    shutil.copytree(finished / "checkpoints" / "80", steps / "40")
    with pytest.raises(ConfigError, match=r"step 40: its step 40 is damaged, or of another run"):
        choose(cfg, saved)


def test_a_teacher_may_leave_and_another_come(config, other, finished):
    cfg = config(f"--{TEACHER}", other)
    saved = saved_with(cfg, finished, chosen.to_json(choose(cfg, None)))
    assert choose(config(), saved) == {}
    assert choose(cfg, saved_with(config(), finished, {}))[TEACHER].step == 40


def test_a_run_that_began_with_random_weights_stays_with_them(config, other, finished):
    cfg = config("--run.init-from", other)
    assert chosen.initial_again(cfg, saved_with(cfg, finished, {})) == {}


@pytest.mark.parametrize("wrong", [5, [1], {"a": 5}, {"a": {"run": 5}}, {"a": {"step": "4"}}])
def test_a_record_of_another_form_is_damage(wrong, finished, tmp_path, monkeypatch):
    assert read_saved(finished, 40).weights_from == {}
    shutil.copytree(finished, tmp_path / "run")
    read = reader._metadata
    changed = lambda *where: read(*where) | {"weights_from": wrong}  # noqa: E731
    monkeypatch.setattr(reader, "_metadata", changed)
    monkeypatch.setattr(reader.integrity, "check_seal", lambda *_: None)
    with pytest.raises(Damaged, match=r"its metadata has another form: .* at weights_from"):
        read_saved(tmp_path / "run", 40)


def test_checkpoints_and_branches_carry_the_record(config, other, only_devices, tmp_path):
    with only_devices(2):
        run = Run.open(config("--run.init-from", other, "--evaluation.every", "0"))
        record = chosen.to_json(run.weights_from)
        with Checkpointer(run.cfg, print, weights_from=record) as saver:
            saver.save(init_state(run.cfg, run.mesh), 0, 0)
        saved = read_saved(run.cfg.run.dir)
        branch(run.cfg.run.dir, str(tmp_path / "branch"), None, print)
        assert saved.weights_from == record and record[INITIAL]["step"] == 40
        assert read_saved(tmp_path / "branch").weights_from == record
        resumed = Run.open(config("--evaluation.every", "0"))
        assert resumed.weights_from == run.weights_from and resumed.origin is None
        assert resumed.initial.again().step == 40


def test_another_process_says_what_it_sees(other, finished):
    there = Chosen(str(other), 40, chosen.digest(other, 40))
    assert chosen.folder_of(TEACHER, there) == other
    with pytest.raises(ConfigError, match="other weights at step 40 in process 0 than where"):
        chosen.folder_of(TEACHER, dataclasses.replace(there, weights="x"))
    goes_on(other, finished, 80)
    with pytest.raises(ConfigError, match="has no checkpoint of step 40 in process 0: there is 80"):
        chosen.folder_of(TEACHER, there)


def about_of(other, step):
    return cache.About(
        teacher=chosen.digest(other, step),
        teacher_name=f"{other}, step {step}",
        **{"sources": ("",), "sequences": (1,), "seq_len": 1, "document_mask": True},
        **{"vocab_size": 1, "top_k": 1, "temperature": 1.0, "rows": 1},
    )


def test_a_cache_stands_for_its_teacher(config, other, finished, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    about = about_of(other, 40)
    (folder / cache.ABOUT_FILE).write_text(cache.about_to_json(about))
    live, cached = (
        config(f"--{TEACHER}", other),
        config(f"--{TEACHER}", other, "--distill.cache", folder),
    )
    first = choose(cached, None)
    assert first == choose(live, None)
    saved = saved_with(cached, finished, chosen.to_json(first))
    goes_on(other, finished, 40, 80)
    assert choose(cached, None) == choose(cached, saved) == choose(live, saved) == first
    # A stopped `jaxpar.data teacher` goes on with the teacher that it has begun with.
    assert teacher.choose_to_keep(live, about)[TEACHER].step == 40
    assert teacher.choose_to_keep(live, None)[TEACHER].step == 80
    goes_on(other, finished, 80)
    assert choose(cached, saved)[TEACHER].weights == about.teacher
    with pytest.raises(ConfigError, match="has other weights than"):
        choose(cached, None)
    (folder / cache.ABOUT_FILE).write_text(cache.about_to_json(about_of(other, 80)))
    with pytest.raises(ConfigError, match=r"distill.cache = .*learned from other weights so far"):
        choose(cached, saved)


def test_the_values_of_a_published_model_are_compared(config, monkeypatch):
    cfg = config()
    monkeypatch.setattr(initial_weights, "digest_of", lambda params, cfg: params)
    monkeypatch.setattr(initial_weights, "find", lambda cfg, chosen: None)
    weights = {INITIAL: Chosen("published")}
    begun = initial_weights.InitialWeights(cfg, weights, None)
    begun.check_published("some")
    assert begun.identity == "some" and weights[INITIAL].weights == "some"
    begun.check_published("some")
    with pytest.raises(ConfigError, match="other weights now than when this run began"):
        begun.check_published("others")


@pytest.mark.parametrize(
    ("weights", "elsewhere", "scored"),
    [("a", False, 0), ("b", False, 1), ("a", True, 1)],
)
def test_scores_of_other_weights_or_of_one_process_alone_are_not_used(
    weights, elsewhere, scored, tmp_path, monkeypatch
):
    """They are computed by all processes or by none: a program of all would wait for the others."""
    calls = []

    class Loader:
        split = "train"

        class dataset:
            fingerprint, num_tokens = "data", 4

        class rows:
            kept = range(2)

    def score(*_):
        calls.append(1)
        return np.zeros(4, np.float32)

    monkeypatch.setattr(reference, "score", score)
    monkeypatch.setattr(reference, "_identity", lambda cfg, loader, weights: weights)
    execution = type("Execution", (), {"cfg": None})
    prepare = lambda weights: reference.prepare_reference(  # noqa: E731
        [Loader()], tmp_path, execution, None, 1, weights, lambda: None, lambda text: None
    )
    prepare("a")
    monkeypatch.setattr(peers, "any_process", lambda missing: missing or elsewhere)
    calls.clear()
    prepare(weights)
    assert len(calls) == scored
