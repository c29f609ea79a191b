"""Two runs that part: the first step, the first place in it, and what explains it."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.certification import bisect, replay, step_inputs
from jaxpar.certification.bisect import Bisection
from jaxpar.certification.options import BisectOptions
from jaxpar.certification.step_inputs import RunDifference
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import read_saved, saved_config
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.commands import call
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.fields import default_of, optional_sections, switch_of
from jaxpar.data.skips import SkippedBatches, write_skipped
from jaxpar.kernels.attention import api, reference
from jaxpar.kernels.attention.capability import CAPABILITIES
from jaxpar.runtime import exit_codes
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import TrainState
from tests.kept_steps import kept

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

STEPS = """--train.num-steps 4 --checkpoint.every 2 --evaluation.every 0 --train.log-every 1
--compute.attention-backend reference""".split()


@pytest.fixture(scope="module")
def train(train_on, write_config, tmp_path_factory) -> Callable[..., Path]:
    """(more options, change) -> the folder of a run of four steps on a device, saved after two.

    Args:     change: called with the folder before it starts.
    """

    def made(*more: str, change: Callable[[Path], Any] = lambda _: None, devices: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("bisected")
        config = write_config(folder)
        (folder / "run").mkdir()
        change(folder / "run")
        assert train_on(devices, config, *STEPS, *more) == exit_codes.EXIT_OK
        return folder / "run"

    return made


@pytest.fixture(scope="module")
def a(train) -> Path:
    """The run that the others are compared with."""
    return train()


@pytest.fixture
def found(a, monkeypatch) -> Iterator[Callable[[Path], Bisection]]:
    """(B, A) -> where they part."""
    for module in (replay, step_inputs):
        monkeypatch.setattr(module, "make_train_step", kept(module.make_train_step))
    yield lambda b, first=a: bisect.bisect(BisectOptions(a=str(first), b=str(b)))


def cause_of(result: Bisection) -> RunDifference:
    assert len(result.cause) == 1, result
    return result.cause[0]


def test_runs_that_agree(found, train, capsys):
    result = found(train())
    assert result.step == 0 and not result.cause
    assert "cause       none: the same bits up to step 4\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_batch(found, train, capsys, a, tmp_path):
    b = train(change=lambda run: write_skipped(run, SkippedBatches(((3, 1),), 0)))
    result = found(b)
    assert (result.step, result.begin) == (4, 2)
    assert cause_of(result) == RunDifference("batch", "batch", "3", "4")
    assert (result.point, result.direction, result.microbatch) == ("tokens", "input", 0)
    assert "cause       batch: 3 in A, 4 in B\n" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert call("certify", ["--bisect", str(a), str(b), "--output", str(page)]) == 1
    assert "batch: 3 in A, 4 in B" in page.read_text()


@pytest.mark.slow
def test_a_dtype(found, train):
    result = found(train("--compute.dtype", "bfloat16"))
    assert result.step == 1
    assert cause_of(result) == RunDifference("dtype", "compute.dtype", "float32", "bfloat16")
    assert (result.layer, result.direction) == ("layer 0 (layers)", "forward")
    assert result.point == "mixer_input"
    first, last, outside = result.layers
    assert 1e-4 < first.forward["mixer_input"] < 0.1 and 1e-4 < last.backward < 0.1
    assert outside.forward["head"] > 1e-4


@pytest.mark.slow
def test_a_weight_changed_by_a_unit_in_the_last_place(found, a, tmp_path, only_devices):
    run = tmp_path / "run"
    shutil.copytree(a, run)
    cfg = replace(saved_config(run, 2), **{"run.dir": str(run)})
    shutil.rmtree(run / "checkpoints")
    (run / "recent.jsonl").write_text(
        "".join((a / "recent.jsonl").read_text().splitlines(keepends=True)[:2])
    )
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    state = restore(replace(cfg, **{"run.dir": str(a)}), mesh, 2)
    flat, tree = jax.tree_util.tree_flatten_with_path(state.params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    arrays = [leaf for _, leaf in flat]
    at = names.index("layers/w_down")
    moved = np.array(arrays[at])
    moved[1, 3, 5] = np.nextafter(moved[1, 3, 5], np.float32(np.inf))
    arrays[at] = jax.device_put(moved, arrays[at].sharding)
    params = jax.tree_util.tree_unflatten(tree, arrays)
    changed: TrainState = dataclasses.replace(state, params=params)
    with Checkpointer(cfg, log=lambda _: None) as saver:
        saver.save(changed, 2, read_saved(a, 2).tokens_seen)
    result = found(run)
    assert result.step == 3
    cause = cause_of(result)
    assert cause.kind == "weights"
    assert cause.name.startswith("params/layers/w_down, 1 of ")
    assert cause.name.endswith("by at most 1 unit in the last place")
    assert (result.layer, result.point) == ("layer 1 (layers)", "feed_forward_output")
    assert any("is not the state that its steps give" in note for note in result.notes)


@pytest.mark.slow
def test_a_flag(found, train, monkeypatch):
    name, value = "xla_cpu_enable_fast_math", "true"
    compile_ = jax.stages.Lowered.compile

    def with_flag(self: Any, compiler_options: Any = None, **more: Any) -> Any:
        return compile_(self, dict(compiler_options or {}) | {name: True}, **more)

    with monkeypatch.context() as patch:  # as a process with the flag compiles its step
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --{name}={value}")
        patch.setattr(jax.stages.Lowered, "compile", with_flag)
        b = train("--train.seed", "0")
    result = found(b)
    assert cause_of(result) == RunDifference("flag", name, "not set", "True")


@pytest.mark.slow
def test_a_kernel(found, train, monkeypatch):
    """A stand-in for one that rounds otherwise, since a CPU has no other."""

    def forward(*args: Any, **options: Any) -> Any:
        out, lse = reference.forward(*args, **options)
        return out * np.asarray(1 + 2**-7, out.dtype), lse

    other = SimpleNamespace(forward=forward, backward=reference.backward)
    monkeypatch.setitem(api.BACKENDS, "cudnn", other)
    monkeypatch.setitem(CAPABILITIES, "cudnn", CAPABILITIES["reference"])
    dtype = "--compute.dtype", "bfloat16"  # which kernels need
    result = found(train(*dtype, "--compute.attention-backend", "cudnn"), train(*dtype))
    name = "compute.attention_backend"
    assert cause_of(result) == RunDifference("kernel", name, "reference", "cudnn")
    assert (result.step, result.layer) == (1, "layer 0 (layers)")
    assert (result.point, result.direction) == ("mixer_output", "forward")
    (tried,) = result.tried
    assert tried.same and result.layers[0].forward["mixer_input"] == 0
    assert 1e-3 < result.layers[0].forward["mixer_output"] < 0.1


@pytest.mark.slow
def test_a_mesh(found, train):
    """Another order of sums: of two microbatches, the first one shows it."""
    many = "--parallel.num-microbatches", "2"
    result = found(train(*many, devices=2), train(*many))
    cause = cause_of(result)
    assert (cause.kind, cause.name) == ("mesh", "parallel")
    assert "data 1" in cause.a and "data 2" in cause.b
    assert result.step == 1 and result.microbatch == 0 and result.direction


@pytest.mark.parametrize("section", [s for s in optional_sections() if s != "checkpoint.memory"])
def test_a_section_of_one_config_is_one_difference(section):
    switch = switch_of(section)
    off, on = Config(), replace(Config(), **{switch: default_of(switch)})
    for a, b in ((off, on), (on, off)):
        (one,) = step_inputs.differing_fields(a, b)
        assert (one.kind, one.name) == ("field", section)
        inputs = [step_inputs.StepInputs(cfg, {}, 0, None, 0) for cfg in (a, b)]
        assert step_inputs.mixed(*inputs, [one]).cfg == b


def test_a_batch_of_one_microbatch():
    cfg = replace(Config(), **{"train.global_batch_size": 8, "parallel.data": 2})
    cfg = replace(cfg, **{"parallel.num_microbatches": 2})
    tokens = jax.numpy.arange(8)[:, None]
    batch = Batch(tokens, tokens, tokens, tokens)
    second = step_inputs.repeated(batch, cfg, 1, 2)
    assert np.asarray(second.labels)[:, 0].tolist() == [2, 3, 2, 3, 6, 7, 6, 7]
    found = [bisect._microbatch_of(cfg, row) for row in range(8)]
    assert found == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.slow
def test_a_seed_is_one_difference_at_the_start(found, train):
    """Not three: initial weights and batches follow from it."""
    result = found(train("--train.seed", "1"))
    assert result.step == 1
    assert cause_of(result) == RunDifference("field", "train.seed", "0", "1")
    assert [one.kind for one in result.differences] == ["field"]


@pytest.mark.slow
def test_a_run_and_a_config(found, write_config, tmp_path):
    """A config of the same fields agrees with the run; one with another rate parts in step 1."""
    file = Path(write_config(tmp_path))
    same = (
        file.read_text()
        .replace("num_steps=120", "num_steps=4")
        .replace(
            'ComputeConfig(dtype="float32")',
            'ComputeConfig(dtype="float32", attention_backend="reference")',
        )
    )
    file.write_text(same)
    result = found(file)
    assert (result.step, result.last) == (0, 4) and not result.notes
    file.write_text(same.replace("learning_rate=1e-2", "learning_rate=2e-2"))
    result = found(file)
    assert result.step == 1 and result.direction == "update"
    assert cause_of(result).name == "optimizer.learning_rate"


def test_what_is_no_run_is_refused(a, tmp_path):
    with pytest.raises(ConfigError, match=r"A = .* is not a run's folder"):
        bisect.bisect(BisectOptions(a=str(tmp_path), b=str(a)))
