"""Steps that tests share among runs: only where all that a step is made from is the same."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.sharding.mesh import make_mesh
from jaxpar.training import programs
from tests.kept_steps import FIELDS_NOT_READ, NOT_READ, ROOMS, read_by_steps, steps_kept
from tests.tiny import TINY


def made(number: int = 1, **fields):
    """The train step of a run on so many devices."""
    cfg = resolve(replace(TINY, **fields), number)
    mesh = make_mesh(cfg.parallel, jax.devices()[:number])
    return programs.make_train_step(cfg, mesh, 4, execution_of(cfg), requested=("expert_rows",))


def test_a_run_takes_the_step_of_another_with_the_same_model():
    outside = programs.make_train_step
    with steps_kept():
        step = made(**{"run.dir": "one"})
        other = {"run.dir": "other", "checkpoint.every": 3, "data.path": "x", "guard.spike": "tell"}
        assert made(**other) is step
        others = made(2), made(**{"optimizer.beta1": 0.5}), made(**{"train.num_steps": 7})
        assert len({step, *others, made(**{"metrics.layers": "all"})}) == 5
    assert programs.make_train_step is outside and made() is not step


@pytest.mark.parametrize("name", ["step.train_step.gradients", "model.norm.norm"])
def test_a_function_that_is_replaced_is_traced(name):
    with steps_kept(), pytest.MonkeyPatch.context() as patch:
        step = made()
        patch.setattr(f"jaxpar.{name}", lambda *_: None)
        assert made() is not step
        patch.undo()
        assert made() is step


def test_runs_of_any_length_take_one_step_with_rates_of_their_own():
    rates = {"optimizer.schedule_as_input": True}
    with steps_kept():
        one, other = (made(**rates, **{"train.num_steps": n}) for n in (7, 70))
        assert one._program is other._program and (one._value[:70] != other._value[:70]).any()
        assert made(**rates, **{"train.num_steps": 3000})._program is not one._program
    alone = made(**rates, **{"train.num_steps": 70})
    np.testing.assert_array_equal(alone._value, other._value)


def test_no_step_reads_what_may_differ():
    fields = "|".join(name for names in FIELDS_NOT_READ.values() for name in names)
    reads = re.compile(rf"\bcfg\.({'|'.join(NOT_READ)})\b|\b\w+\.({fields})\b(?!\()")
    files = [file for room in ROOMS for file in Path(jaxpar.__file__).with_name(room).rglob("*.py")]
    assert len(files) > 100
    found = {
        file.name: [line for line in file.read_text("utf-8").splitlines() if reads.search(line)]
        for file in files
    }
    names = {"experts.mixture", "fsdp.prefetch"}  # a function and a module
    assert not [line for lines in found.values() for line in lines if not names_one_of(line, names)]


def names_one_of(line: str, names: set[str]) -> bool:
    return any(name in line for name in names)


def test_what_is_read_stays():
    cfg = replace(TINY, **{"train.num_steps": 7, "data.seq_len": 16, "guard.loss_scale": 8.0})
    kept = read_by_steps(replace(cfg, **{"data.path": "x", "train.log_every": 3}))
    assert kept == read_by_steps(cfg) and kept.train.num_steps == 7
    assert (kept.data.seq_len, kept.guard.loss_scale) == (16, 8.0)
