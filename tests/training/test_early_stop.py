"""The best checkpoint, which is kept, and the end of a run that gets no better; exact on resume."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.checkpoint import best
from jaxpar.checkpoint.best import Best, step_of
from jaxpar.checkpoint.saved import read_saved, saved_of, saved_steps
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, EvaluationSet, replace
from jaxpar.config.command_line import read_config
from jaxpar.config.declared import Misshapen
from jaxpar.config.validate import check, resolve
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.inference.generation import config_for_sampling
from jaxpar.runtime import exit_codes
from jaxpar.runtime.files import json_lines
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from tests.fingerprints import quickly_computed

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

#: The rate is too small to change a weight: no evaluation is better than the first.
WORDS = """--train.num-steps 20 --evaluation.every 2 --evaluation.num-batches 1 --checkpoint.every 4
--checkpoint.keep 1 --checkpoint.best held_out --train.early-stop-patience 3
--optimizer.learning-rate 1e-12 --optimizer.schedule constant --optimizer.warmup-steps 0
--evaluation.test True"""


def test_a_run_stops_early_as_it_would_have_without_a_pause(
    train_on, config_file, text_file, tmp_path, capsys
):
    three = str(tmp_path / "three")
    prepare(PrepareOptions(input=(str(text_file),), output=three, split=(2, 1, 1)))

    def train(name: str, *more: str) -> Path:
        run = tmp_path / name
        words = (*WORDS.split(), "--data.path", three, "--run.dir", str(run), *more)
        assert train_on(1, config_file, *words) == exit_codes.EXIT_OK
        return run

    def tested(run: Path) -> list[int]:
        return [r["step"] for r in json_lines.read(run / "metrics.jsonl") if "test_loss" in r]

    whole = train("whole")
    assert "stopped early: no better than held_out" in capsys.readouterr().out
    assert saved_steps(whole) == [2, 8] and tested(whole) == [8]
    paused = train("paused", "--train.num-steps", "4")
    assert saved_steps(paused) == [2, 4]
    train("paused")
    assert saved_steps(paused) == [2, 8]
    assert read_saved(whole, 8).best == read_saved(paused, 8).best
    assert read_saved(whole, 8).best | {"value": 0, "what": ""} == {
        "what": "",
        "step": 2,
        "value": 0,
        "stale": 3,
    }
    assert read_saved(whole, 8).fingerprints == read_saved(paused, 8).fingerprints
    capsys.readouterr()
    train("paused")
    assert "already done" in (said := capsys.readouterr().out) and "3 of 3 evaluations" in said
    train("paused", "--train.early-stop-patience", "4")
    assert saved_steps(paused) == [2, 10] and tested(paused) == [4, 8, 10]

    assert step_of(whole, "best") == 2 and step_of(whole, None) is None and step_of(whole, 8) == 8
    assert call("checkpoint", ["ls", str(whole)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "; best, held_out " in rows[-2] and "best" not in rows[-1]
    assert (
        call("convert", ["to-hf", str(whole), str(tmp_path / "hf"), "--step", "best", "--no-check"])
        == 0
    )
    assert "of step 2" in capsys.readouterr().out


def test_the_best_checkpoint_is_kept_and_one_that_failed_is_not_counted(
    config_file, tmp_path, monkeypatch
):
    cfg = resolve(read_config([config_file, *WORDS.split()]), 1)
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    like = state.abstract_logical(cfg, mesh)

    def running(step: int) -> state.TrainState:
        made = jax.tree.map(lambda a: np.full(a.shape, step, a.dtype), like)
        return jax.device_put(made, jax.tree.map(lambda a: a.sharding, like))

    def save(saver: Checkpointer, step: int, of: int) -> None:
        saver.save(running(step), step, step, Best("held_out of x", of, 1.0, step - of))
        saver.wait()

    with quickly_computed(), Checkpointer(cfg) as saver:
        for step, of in ((1, 1), (2, 1), (3, 1)):
            save(saver, step, of)
        assert saved_steps(cfg.run.dir) == [1, 3]
        for step, of in ((4, 4), (5, 4)):
            save(saver, step, of)
        assert saved_steps(cfg.run.dir) == [4, 5]
        with monkeypatch.context() as patch:
            patch.setattr(saver._orbax, "save_async", fails)
            save(saver, 6, 6)
        assert saver._best.step == 4
        saver.save(running(7), 7, 7)
        saver.wait()
    assert saved_steps(cfg.run.dir) == [4, 7]
    with pytest.raises(ConfigError, match="has no best checkpoint"):
        step_of(cfg.run.dir, "best")  # step 7 was saved without any


def fails(*_, **__):
    raise OSError("no space left on device")


#: A best checkpoint by the moving average.
OF_EMA = {
    "optimizer.ema.decay": 0.9,
    "checkpoint.best": "ema",
    "train.early_stop_patience": 2,
    "evaluation.sets": (EvaluationSet("web", "data/web"),),
}


def test_the_best_of_some_values():
    found = Best("held_out of x")
    for step, value in enumerate([math.nan, 3.0, 3.0, math.inf, 2.0, 2.5, math.nan]):
        found = found.after(step, value)
    assert (found.step, found.value, found.stale) == (4, 2.0, 2)
    none = Best("held_out of x").after(1, math.nan)
    assert (none.step, none.value, none.stale) == (0, None, 1) and str(none) == "no held_out yet"


def test_another_metric_starts_anew(config_file, tmp_path):
    """So does the same one on other data."""
    base = read_config([config_file, *WORDS.split()])
    web = {"evaluation.sets": OF_EMA["evaluation.sets"], "checkpoint.best": "web"}
    of_test = (EvaluationSet("web", "data/web", "test"),)
    other = web | {"evaluation.sets": of_test}
    said = [best.fresh(replace(base, **fields)).what for fields in ({}, web, other)]
    assert len(set(said)) == 3 and best.fresh(replace(base, **{"checkpoint.best": ""})) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"checkpoint.best": "web"}, "must be what is evaluated, held_out, or empty"),
        ({"checkpoint.best": "test"}, "must be what is evaluated"),
        ({"checkpoint.best": "ema"}, "must be what is evaluated"),
        ({"checkpoint.best": "held_out", "evaluation.every": 0}, "is never evaluated"),
        ({"checkpoint.best": "held_out", "checkpoint.every": 0}, "needs checkpoints"),
        ({"train.early_stop_patience": 3}, "but checkpoint.best is empty.*best held_out"),
        ({"train.early_stop_patience": -1}, "must not be negative"),
    ],
)
def test_what_cannot_be_judged(fields, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(Config(), **fields))
    check(replace(Config(), **OF_EMA))


def test_programs_that_train_nothing_take_such_a_config():
    """They have no moving average, no evaluation and no checkpoints."""
    check(config_for_sampling(replace(Config(), **OF_EMA)))


def test_a_best_of_the_wrong_form_is_damage():
    sections = {"model": {}, "train": {}, "data": {}, "parallel": {}}
    about = {"step": 1, "tokens_seen": 8, "config": sections, "dataset": "", "versions": {}}
    about |= {"fingerprints": {}}
    read = lambda best: saved_of(about | {"best": best}, "its metadata").best  # noqa: E731
    good = {"what": "held_out", "step": 1, "value": 1.0, "stale": 0}
    assert read({}) == {} and read(good) == good
    assert read(good | {"value": None})["value"] is None
    assert read(good | {"more": 1}) == good  # of a later version
    for wrong in ([], good | {"step": "1"}, good | {"stale": -1}, {"what": "x"}):
        with pytest.raises(Misshapen):
            read(wrong)
