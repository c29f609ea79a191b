"""Whole runs whose numbers go wrong: updates left out, code 17, spikes told and rewound."""

import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.checkpoint.saved import read_saved
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import read_config
from jaxpar.data.loader import Loader
from jaxpar.data.skips import SKIPPED_FILE, SkippedBatches, read_skipped, write_skipped
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.monitoring.recent_steps import read_recent, values_judged
from jaxpar.runtime import exit_codes
from jaxpar.step import train_step
from jaxpar.training import manifest
from jaxpar.training.run import Run
from jaxpar.training.step_guard import StepGuard, Window
from tests.e2e.test_train import losses_of, records_of, state_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

#: A run that spikes.
FLAGS = """--train.num-steps 60 --train.log-every 1 --checkpoint.every 20 --evaluation.every 0
--guard.spike-window 16 --guard.spike-deviations 8 --guard.spike-skip 2
--guard.replica-check-every 20""".split()

#: The batch, whichever step takes it, that is noise.
NOISE = 46


@pytest.fixture
def noise() -> set[int]:
    """The batches that are noise."""
    return {NOISE}


@contextlib.contextmanager
def noisy_batches(noise: set[int]) -> Iterator[None]:
    """The loader gives noise for these batches."""
    host_rows = Loader.host_rows

    def noisy(self, step, rows):
        batch = host_rows(self, step, rows)
        if self.skipped.batch_of(step) not in noise:
            return batch
        tokens = np.random.default_rng(0).integers(0, 256, batch.tokens.shape, np.int32)
        return dataclasses.replace(batch, tokens=tokens, labels=tokens[:, ::-1].copy())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "host_rows", noisy)
        yield


@pytest.fixture
def spiky(train_on, config_file, noise):
    """(number of devices, more flags) -> the exit code of a run in which `noise` is noise."""
    with noisy_batches(noise):
        yield lambda number, *more: train_on(number, config_file, *FLAGS, *more)


def batches_of(run: Path) -> dict[int, int]:
    """The batch that each step took, as the run's records have it."""
    return {step: record["batch"] for step, record in read_recent(run).items()}


@pytest.mark.slow
def test_a_spike_is_told_and_a_rewind_leaves_its_batches_out(spiky, capfd, tmp_path):
    run = tmp_path / "run"
    assert spiky(2) == exit_codes.EXIT_OK
    assert "WARNING    step 47: loss " in capfd.readouterr().out
    before = losses_of(run)
    shutil.rmtree(run)

    assert spiky(2, "--guard.spike", "rewind") == exit_codes.EXIT_OK
    assert "rewound to step 40; batches 45 to 46 are skipped" in capfd.readouterr().out
    assert read_skipped(run).ranges == ((45, 2),)
    assert read_saved(run).skipped_batches == [[45, 2]]
    assert read_saved(run).rewinds == 1
    found = losses_of(run)
    assert sorted(found) == list(range(1, 61))
    assert {i: found[i] for i in range(1, 46)} == {i: before[i] for i in range(1, 46)}
    assert before[47] > 3 > 1 > max(found[i] for i in range(40, 61))
    batches = batches_of(run)
    assert [batches[i] for i in (45, 46, 60)] == [44, 47, 61]

    # The checkpoint alone says so, on another mesh, too; and none is left out twice.
    (run / SKIPPED_FILE).unlink()
    mesh = ("--parallel.tensor", "2", "--parallel.data", "1", "--guard.spike", "rewind")
    assert spiky(2, *mesh, "--train.num-steps", "70") == exit_codes.EXIT_OK
    assert batches_of(run) == batches | {i: i + 1 for i in range(61, 71)}
    assert "is a spike" not in capfd.readouterr().out


def test_losses_of_steps_left_out_judge_no_other():
    """The update of a step with a non-finite gradient is skipped, whatever its loss."""
    records = [{"loss": 2.0, "grad_norm": 1.0}, {"loss": 54.0, "grad_norm": None}]
    assert values_judged([*records, {"loss": None, "grad_norm": None}, {}]) == [2.0]


@pytest.mark.slow
@pytest.mark.parametrize("records", ["512", "0"])
def test_a_run_that_is_resumed_sees_the_spike_that_it_would_have_seen(spiky, capfd, records):
    flags = ("--guard.recent-steps", records)
    assert spiky(2, *flags, "--train.num-steps", "40") == exit_codes.EXIT_OK
    assert spiky(2, *flags, "--guard.spike", "rewind") == exit_codes.EXIT_OK
    assert "rewound to step 40; batches 45 to 46 are skipped" in capfd.readouterr().out


def test_batches_that_are_left_out_are_told_at_the_start(
    only_devices, config_file, tmp_path, capfd
):
    file = tmp_path / "run" / SKIPPED_FILE
    file.parent.mkdir()
    file.write_text('{"windows": [[0, 1], [45, 2]]}')
    with only_devices(2):
        begun = Run.open(read_config([config_file]))
        manifest.write(begun, [])
    line = f"skipped    batches 0, 45 to 46, listed in {file}"
    fresh = "; this run starts from scratch: delete the file to train on them\n"
    assert line + fresh in capfd.readouterr().out
    begun = dataclasses.replace(begun, on_disk=3)  # it resumes
    assert manifest.left_out(begun) == line.removeprefix("skipped    ")
    file.unlink()
    assert manifest.left_out(begun).endswith("45 to 46, listed in the checkpoint of step 3")
    begun.loader.skipped = SkippedBatches()
    assert manifest.left_out(begun) == ""


@pytest.mark.slow  # quicker: bad batches, too many in a row
def test_too_many_rewinds_end_the_run_with_17(spiky):
    with pytest.raises(exit_codes.BadNumerics, match=r"step 47: .* is a spike.*rewound 0 times"):
        spiky(2, "--guard.spike", "rewind", "--guard.max-rewinds", "0")


def test_a_spike_that_returns_ends_the_run_after_as_many_rewinds(spiky, noise, tmp_path):
    noise |= set(range(NOISE, 200))  # windows that touch become one, and each rewind counts
    with pytest.raises(exit_codes.BadNumerics, match=r"step 46: .* is a spike.*rewound 2 times"):
        spiky(2, "--guard.spike", "rewind", "--guard.max-rewinds", "2")
    assert read_skipped(tmp_path / "run") == SkippedBatches(((45, 3),), 2)


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_ends_instead_of_a_rewind(spiky, monkeypatch, tmp_path, capfd):
    write_previous = MetricsWriter.write_previous

    def stopped(self, step, *measured):
        write_previous(self, step, *measured)
        if step == 46:  # its loss, a spike, has not arrived
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsWriter, "write_previous", stopped)
    assert spiky(2, "--guard.spike", "rewind") == exit_codes.EXIT_PREEMPTED
    said = capfd.readouterr().out
    assert "SIGTERM: step 47: loss " in said and "rewound" not in said
    assert "stopped without saving; the same command resumes from the checkpoint of step 40" in said
    assert not (tmp_path / "run" / SKIPPED_FILE).exists()


@pytest.mark.parametrize("spike, records, kept", [("tell", 0, 4), ("tell", 2, 4), ("ignore", 0, 0)])
def test_as_many_records_are_kept_as_spikes_are_judged_by(tmp_path, spike, records, kept):
    given = {"guard.spike": spike, "guard.recent_steps": records, "guard.spike_window": 4}
    cfg, told = replace(Config(), **given), []
    for first in (0, 9):  # from the start, and where it goes on
        looking = StepGuard(cfg, tmp_path, first, lambda step: step, told.append)
        for step in range(first, first + 9):
            looking.look(step, {"loss": 2.0, "grad_norm": 1.0})
        assert len(read_recent(tmp_path)) >= kept and (kept or not list(tmp_path.iterdir()))
    resumed = StepGuard(cfg, tmp_path, 18, lambda step: step, told.append)
    resumed.look(18, {"loss": 9.0, "grad_norm": 1.0})
    assert len(told) == (spike == "tell") and all("step 19: loss 9.0000 is a" in t for t in told)


def test_a_metric_of_layers_is_watched_and_the_layer_is_told(tmp_path):
    given = {"guard.spike_metric": "layer_grad_norm", "guard.spike_window": 4}
    cfg, told = replace(Config(), **given), []
    looking = StepGuard(cfg, tmp_path, 0, lambda step: step, told.append)
    norms = lambda last: np.array([1.0, np.nan, last], np.float32)  # noqa: E731
    seen = lambda last: {"loss": 2.0, "grad_norm": 1.0, "layer_grad_norm": norms(last)}  # noqa: E731
    for step in range(4):
        looking.look(step, seen(2.0))
    resumed = StepGuard(cfg, tmp_path, 4, lambda step: step, told.append)
    resumed.look(4, seen(9.0))
    text = "step 5: layer_grad_norm of layer 2 9.0000 is a spike, above 2.2000; batch 4"
    assert told == [f"WARNING    {text}"]
    resumed.look(5, {"loss": 60.0, "grad_norm": 1.0, "layer_grad_norm": norms(2.0) * np.nan})
    assert len(told) == 1 and read_recent(tmp_path)[6]["layer_grad_norm"] is None


@pytest.mark.slow
def test_a_spike_of_a_layer_is_told(spiky, capfd):
    watched = ("--guard.spike-metric", "layer_grad_norm", "--metrics.layers", "cheap")
    assert spiky(2, *watched, "--train.num-steps", "47") == exit_codes.EXIT_OK
    assert "WARNING    step 47: layer_grad_norm of layer " in capfd.readouterr().out


def test_a_metric_that_is_not_recorded_cannot_be_watched(spiky):
    with pytest.raises(
        ConfigError, match=r"guard.spike_metric = 'layer_grad_norm': .*--metrics.layers cheap"
    ):
        spiky(1, "--guard.spike-metric", "layer_grad_norm")


@pytest.mark.slow
def test_a_metric_of_layers_that_some_steps_lack_cannot_be_watched(spiky):
    watched = ("--guard.spike-metric", "layer_grad_norm", "--metrics.layers", "cheap")
    with pytest.raises(ConfigError, match=r"'layer_grad_norm': .*--metrics.layers_every 1"):
        spiky(1, *watched, "--metrics.layers_every", "2")
    assert spiky(1, *watched, "--metrics.layers_every", "1") == exit_codes.EXIT_OK


def test_a_metric_without_a_value_is_no_skipped_update(tmp_path):
    told: list[str] = []
    guard = StepGuard(Config(), tmp_path, 0, lambda step: step, told.append)
    guard.look(0, {"loss": 2.0, "grad_norm": 1.0, "loss_of_a_source": np.nan, "in_a_row": 0})
    assert not told


def test_a_rewind_needs_checkpoints(spiky):
    with pytest.raises(ConfigError, match=r"guard.spike = 'rewind': .* checkpoint.every is 0"):
        spiky(2, "--guard.spike", "rewind", "--checkpoint.every", "0")


@contextlib.contextmanager
def poisoned_batches(bad: set[int]) -> Iterator[None]:
    """These steps' batches, counted from 0, make the loss and all gradients NaN."""
    measure = train_step.gradients

    def poisoned(*args):
        s = measure(*args)
        is_bad = jnp.any(jnp.stack([s.step == b for b in sorted(bad)]))
        nan = lambda x: jnp.where(is_bad, jnp.nan, x)  # noqa: E731
        s = s.with_metrics(loss=nan(s.metrics["loss"]))
        return s.replace(grads=jax.tree.map(nan, s.grads))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "gradients", poisoned)
        yield


def test_bad_batches_are_left_out_and_too_many_in_a_row_end_the_run(
    train_on, config_file, tmp_path, capfd
):
    run = tmp_path / "run"
    flags = "--train.num-steps 30 --checkpoint.every 10 --evaluation.every 0".split()
    with poisoned_batches({5, 6, 15}):
        assert train_on(1, config_file, *flags) == exit_codes.EXIT_OK
    said = capfd.readouterr().out
    assert "WARNING    step 6: loss = nan: the update was skipped" in said
    assert "(2 in a row, 2 in total)" in said and "(1 in a row, 3 in total)" in said
    records = {r["step"]: r for r in records_of(run) if "loss" in r}
    assert records[6]["loss"] is None and records[30]["skipped"] == 3
    assert records[8]["learning_rate"] == pytest.approx(6e-3)  # the schedule waited
    state = state_of(run)
    assert int(state.extra["guard"]["skipped"]) == 3 and int(state.opt_state[0].count) == 27

    with poisoned_batches({33, 34, 35}), pytest.raises(exit_codes.BadNumerics) as stopped:
        train_on(1, config_file, *flags, "--train.num-steps", "50")
    why = str(stopped.value)
    assert why.startswith("step 36: loss = nan")
    assert "3 updates in a row were skipped, and guard.max_skips is 3" in why
    assert "Checkpoints of earlier steps are untouched" in why
    chex.assert_trees_all_equal(state_of(run), state, strict=True)


# ------------------------------------------------------------------------------- the parts


def test_a_window_calls_spikes_and_not_noise():
    rng = np.random.default_rng(0)
    window = Window(64, 10.0)
    for step in range(1000):
        loss = 3.0 * 0.999**step + rng.normal() * 0.02
        assert loss < window.limit()
        window.add(loss)
    assert window.limit() < 3.0 * 0.999**1000 + 0.4
    flat = Window(64, 10.0, [2.0] * 64)
    assert flat.limit() == pytest.approx(2.2)  # rounding is no spike
    outliers = Window(64, 10.0, [2.0] * 40 + [50.0] * 24)
    assert outliers.limit() < 3.0  # a median does not mind them
    assert Window(64, 10.0, [2.0] * 31).limit() == float("inf")


def test_batches_left_out_by_arithmetic():
    none = SkippedBatches()
    assert [none.batch_of(i) for i in range(3)] == [0, 1, 2]
    some = none.and_also([[3, 2], [6, 1]])
    assert [some.batch_of(i) for i in range(6)] == [0, 1, 2, 5, 7, 8]
    assert some.and_also([(4, 2)]).ranges == ((3, 4),)
    assert some.and_also(some.ranges) == some
    assert none.and_also([(0, 2**30), (5, 2), (2**30, 1)]).ranges == ((0, 2**30 + 1),)


def test_rewinds_are_counted_and_a_file_without_them_has_one_for_each_window(tmp_path):
    counted = SkippedBatches().after_rewind(3, 2).after_rewind(5, 2)
    assert counted == SkippedBatches(((3, 4),), 2)
    write_skipped(tmp_path, counted)
    assert read_skipped(tmp_path) == counted
    # A checkpoint from before the last rewind takes none back.
    assert counted.and_also([[3, 2]], 1) == counted.and_also([[3, 2]]) == counted
    (tmp_path / SKIPPED_FILE).write_text('{"windows": [[3, 2], [9, 1]]}')
    assert read_skipped(tmp_path).rewinds == 2


def test_a_damaged_list_of_batches_left_out_is_named(tmp_path):
    for text in (
        "{",
        '{"windows": 3}',
        "[]",
        '{"windows": [], "rewinds": "x"}',
        '{"windows": [], "rewinds": -1}',
        '{"windows": [[0, 1000000000000]]}',  # which was a set of as many batches
        '{"windows": [[-1, 2]]}',
        '{"windows": [[1, 2, 3]]}',
        '{"windows": [["1", 2]]}',
        '{"windows": [[1, Infinity]]}',
        '{"windows": ' + "[" * 100_000,
    ):
        (tmp_path / SKIPPED_FILE).write_text(text)
        with pytest.raises(ConfigError, match=f"run.dir = .* has a {SKIPPED_FILE} that cannot be"):
            read_skipped(tmp_path)
