"""Steps that tests share among runs: only where all that a step is made from is the same."""

import re
from pathlib import Path

import jax
import pytest

import jaxpar
from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.sharding.mesh import make_mesh
from jaxpar.training import programs
from tests.kept_steps import NOT_READ, ROOMS, steps_kept
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
        assert made(**{"run.dir": "other", "checkpoint.every": 3}) is step
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


def test_no_step_reads_what_may_differ():
    reads = re.compile(rf"\bcfg\.({'|'.join(NOT_READ)}|metrics\.(?!layers(_every)?\b)\w+)\b")
    files = [file for room in ROOMS for file in Path(jaxpar.__file__).with_name(room).rglob("*.py")]
    assert len(files) > 100
    found = {file.name: reads.findall(file.read_text("utf-8")) for file in files}
    assert not {name: names for name, names in found.items() if names}
