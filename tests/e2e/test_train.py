"""Whole runs: killed, preempted, moved to another mesh, refused, sampled; nothing is lost."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.checkpoint.loading import restore, restore_params
from jaxpar.checkpoint.saved import checkpoint_folder, read_saved, saved_config, saved_steps
from jaxpar.commands import call
from jaxpar.config import ConfigError, replace
from jaxpar.config.serialize import from_json
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.tokenizer import load_tokenizer
from jaxpar.inference import sample as inference_sample
from jaxpar.inference.generation import config_for_sampling
from jaxpar.inference.options import Sampling
from jaxpar.model.plain import decoder
from jaxpar.monitoring.metrics import MetricsWriter
from jaxpar.runtime import exit_codes
from jaxpar.sharding.mesh import make_mesh
from tests.slow import slow
from tests.weights import as_programs_do

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[2]

#: The training program, in which a signal arrives when a step has just been dispatched, once the
#: checkpoints so far are written: SIGNAL STEP CHECKPOINTS CONFIG ...
INTERRUPTED = """
import os, signal, sys, time
from jaxpar.checkpoint.saved import saved_steps
from jaxpar.commands import call
from jaxpar.runtime.program import run_program
from jaxpar.monitoring import metrics
number, at, saved = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv[1:4] = []
write_previous = metrics.MetricsWriter.write_previous
def interrupted(self, step, *measured):
    if step == at:
        while len(saved_steps(self.cfg.run.dir)) < saved:
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, number))
    write_previous(self, step, *measured)
metrics.MetricsWriter.write_previous = interrupted
run_program(lambda argv: call("train", argv))
"""


def environment_of_start() -> dict[str, str]:
    """For a process on one simulated device; what it compiles is kept as in this process."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return os.environ | {"PYTHONPATH": str(ROOT)} | cache


def start(*command: str) -> subprocess.CompletedProcess:
    """A program of Python's, in such a process."""
    env = environment_of_start()
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=600
    )


def records_of(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def losses_of(run: Path) -> dict[int, float]:
    """Loss of each step; of two records of one step, the later counts."""
    return {r["step"]: r["loss"] for r in records_of(run) if "loss" in r}


def held_out_of(run: Path) -> dict[int, float]:
    """Held-out loss by step."""
    return {r["step"]: r["held_out_loss"] for r in records_of(run) if "held_out_loss" in r}


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def config_of(run: Path, **values):
    """The saved config for one device of this process."""
    cfg = config_for_sampling(from_json((run / "config.json").read_text("utf-8")))
    return replace(cfg, **{"run.dir": str(run)} | values)


def state_of(run: Path, step: int | None = None):
    """A saved state, on the host."""
    cfg = config_of(run)
    return jax.device_get(restore(cfg, one_device(cfg), step))


def one_device(cfg):
    return make_mesh(cfg.parallel, jax.devices()[:1])


@pytest.fixture
def copy(finished: Path, config_file: str) -> Path:
    """A copy of the finished run, which `config_file` continues."""
    run = Path(config_file).parent / "run"
    shutil.copytree(finished, run)
    return run


# ---------------------------------------------------------------------------- interrupted


@pytest.fixture
def stopped_after(monkeypatch):
    """(step) -> SIGTERM arrives in this process, once that step has been dispatched."""
    write_previous = MetricsWriter.write_previous

    def at(number: int) -> None:
        def stopped(self, step, *measured):
            if step == number:
                os.kill(os.getpid(), signal.SIGTERM)
            write_previous(self, step, *measured)

        monkeypatch.setattr(MetricsWriter, "write_previous", stopped)

    return at


def test_a_run_preempted_and_then_killed_ends_as_if_nothing_had_happened(
    config_file, tmp_path, train_on, finished, stopped_after, capsys, monkeypatch
):
    run, command = tmp_path / "run", (config_file, "--run.cpu-devices", "2")
    capsys.readouterr()
    with as_programs_do():
        stopped_after(9)
        assert train_on(2, *command) == exit_codes.EXIT_PREEMPTED == 75
        monkeypatch.undo()
    said = capsys.readouterr().out
    assert "SIGTERM: saved step 10; the same command resumes from there" in said
    assert saved_steps(run) == [10]

    killed = start("-c", INTERRUPTED, "SIGKILL", "47", "2", *command)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "restored step 10" in killed.stdout
    assert saved_steps(run) == [10, 40]
    assert max(losses_of(run)) > 40  # some steps are lost, and taken again

    with as_programs_do():
        assert train_on(2, *command) == exit_codes.EXIT_OK
        assert "restored step 40" in capsys.readouterr().out
    assert losses_of(run) == losses_of(finished)
    assert sorted(losses_of(run)) == list(range(1, 121))
    assert held_out_of(run) == held_out_of(finished)
    chex.assert_trees_all_equal(state_of(run), state_of(finished), strict=True)


MOVES = [
    pytest.param("--parallel.tensor 2 --parallel.data 1", 80, id="tensor"),
    slow(
        "--parallel.pipeline 2 --parallel.zero 1 --parallel.num-microbatches 2", 80, id="pipeline"
    ),
]


@pytest.mark.slow  # quicker: checkpoint/test_checkpoint.py
@pytest.mark.parametrize(("mesh", "step"), MOVES)
def test_a_run_goes_on_on_another_mesh(train_on, config_file, copy, finished, mesh, step):
    for later in saved_steps(copy):
        if later > step:
            shutil.rmtree(checkpoint_folder(copy) / str(later))
    assert train_on(2, config_file, "--evaluation.every", "0", *mesh.split()) == exit_codes.EXIT_OK
    assert {"resumed_after_step": step} in records_of(copy)
    again = records_of(copy)[len(records_of(finished)) :]
    found, wanted = {r["step"]: r["loss"] for r in again if "loss" in r}, losses_of(finished)
    assert list(found) == list(range(step + 1, 121))
    np.testing.assert_allclose(list(found.values()), [wanted[i] for i in found], rtol=1e-5)
    np.testing.assert_allclose(found[step + 1], wanted[step + 1], rtol=1e-6)
    params, expected = state_of(copy).params, state_of(finished).params
    chex.assert_trees_all_close(params, expected, rtol=0, atol=1e-5)


def test_a_finished_run_has_nothing_left_to_do(train_on, config_file, copy):
    before, state = losses_of(copy), state_of(copy)
    assert train_on(2, config_file) == exit_codes.EXIT_OK
    assert losses_of(copy) == before
    assert saved_steps(copy) == [40, 80, 120]
    chex.assert_trees_all_equal(state_of(copy), state, strict=True)


# -------------------------------------------------------------------------------- refused


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    train_on, config_file, copy
):
    before = state_of(copy)
    more = ("--train.num-steps", "140", "--optimizer.learning-rate", "1e30")
    with pytest.raises(exit_codes.BadNumerics, match="Checkpoints of earlier steps are untouched"):
        train_on(2, config_file, *more, "--optimizer.schedule", "constant")
    assert saved_steps(copy) == [40, 80, 120]
    chex.assert_trees_all_equal(state_of(copy), before, strict=True)
    losses = losses_of(copy)
    assert all(math.isfinite(losses[step]) for step in losses if step <= 121)
    assert {losses[step] for step in losses if step > 121} == {None}  # null, not JSON's unknown NaN


D_FF = "model.layers.feed_forward.d_ff"
REFUSED = [
    ("--checkpoint.resume never", "checkpoint.resume", "contains the checkpoint of step 120"),
    ("--data.seq-len 16", "data.seq_len", "the checkpoint of step 120 has 32"),
    ("--train.global-batch-size 16", "train.global_batch_size", "has 8"),
    (
        "--model.layers.feed-forward.d-ff 128",
        "model.layers.feed_forward.d_ff",
        "the checkpoint of step 120 has 64",
    ),
    ("--optimizer.name lion", "optimizer.name", "has 'adamw'"),
    ("--model.vocab-size 256", "model.vocab_size", "must cover the 257 tokens"),
]


@pytest.mark.parametrize(("args", "field", "rule"), REFUSED)
def test_what_cannot_go_on_is_refused_and_nothing_is_overwritten(
    train_on, config_file, copy, args, field, rule
):
    before = files_of(copy)
    with pytest.raises(ConfigError) as caught:
        train_on(2, config_file, "--train.num-steps", "140", *args.split())
    assert caught.value.field == field
    assert rule in caught.value.rule
    assert files_of(copy) == before


def test_resume_must_needs_a_checkpoint_and_makes_no_folder(train_on, config_file, tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint.resume = 'must': .* no finished checkpoint"):
        train_on(2, config_file, "--checkpoint.resume", "must")
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------- learning


def test_the_loss_falls_far_below_the_unigram_entropy(finished, dataset):
    entropy, losses = read_meta(dataset).unigram_entropy, losses_of(finished)
    assert losses[1] > entropy > 2.0
    assert losses[120] < 0.1 * entropy
    assert held_out_of(finished)[120] < 0.1 * entropy


def greedy_text(run: Path, prompt: str, count: int) -> str:
    """What the plain reference model finds likeliest, one token after the other."""
    cfg = config_of(run)
    tokenizer = load_tokenizer(cfg.data.path)
    params = restore_params(run, cfg, one_device(cfg))
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    T, V = 128, tokenizer.vocab_size
    # Of the text so far, a token sees as many as in training.
    model = replace(cfg, **{"model.layers.mixer.window": cfg.data.seq_len}).model
    place, ones = jnp.arange(T)[None], jnp.ones((1, T), jnp.int32)
    logits = jax.jit(lambda tokens: decoder.logits_of(params, tokens, place, ones, model))
    ids = [int(i) for i in tokenizer.encode(prompt)]
    new = []
    while len(new) < count:
        text = ids + new
        row = logits(jnp.asarray([text + [0] * (T - len(text))]))[0, len(text) - 1, :V]
        new.append(int(row.argmax()))
    assert tokenizer.eos_id not in new
    return prompt + tokenizer.decode(new)


def test_a_sample_at_temperature_0_is_what_the_reference_model_finds_likeliest(finished, capsys):
    prompt, count = "the cat ", 60  # beyond the window of 32
    wanted = greedy_text(finished, prompt, count)
    texts = []
    for other in (["--seed", "0"], ["--seed", "1", "--tensor", "2"]):
        args = ["--prompt", prompt, "--max-tokens", str(count), "--temperature", "0"]
        capsys.readouterr()
        call("sample", [str(finished), *args, *other])
        texts.append(capsys.readouterr().out.removesuffix("\n"))
    assert texts[0] == texts[1] == wanted
    assert "the mat, and the dog sat on the log.\n" in wanted


@pytest.mark.slow
def test_a_sample_is_a_function_of_its_seed(finished, capsys):
    def text(seed: int, step: int | None = None) -> str:
        how = Sampling(temperature=5.0, top_k=0, seed=seed)
        capsys.readouterr()
        options = inference_sample.SampleOptions(
            run=str(finished), prompt=("the ",), max_tokens=20, step=step, sampling=how
        )
        inference_sample.sample(options)
        return capsys.readouterr().out

    assert text(1) == text(1, step=120) != text(2)


# -------------------------------------------------------------------------------- records


def test_metrics_have_their_fields(finished):
    records = records_of(finished)
    steps = [r for r in records if "loss" in r]
    held_out = [r for r in records if "held_out_loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 121))
    assert [r["step"] for r in held_out] == [60, 120]
    always = {"step", "learning_rate", "loss", "grad_norm", "num_tokens", "tokens_seen"}
    speed = {"step_seconds", "tokens_per_second", "tokens_per_second_per_device"}
    for record in steps:
        assert always | {"memory_gib"} <= record.keys()
        assert record["tokens_seen"] == record["step"] * 8 * 32
        assert 0 < record["num_tokens"] <= 8 * 32
        assert all(math.isfinite(value) for value in record.values())
    assert speed | {"data_wait_seconds"} <= steps[4].keys()
    assert not speed & steps[0].keys()  # that was compilation
    assert steps[0]["learning_rate"] == pytest.approx(1e-2 / 10)
    assert max(r["learning_rate"] for r in steps) == pytest.approx(1e-2)
    for record in held_out:
        assert record.keys() == {"step", "held_out_loss", "bits_per_byte"}
        assert record["bits_per_byte"] > record["held_out_loss"] / math.log(2)  # end of text


def test_the_folder_says_what_the_run_is(finished):
    cfg = from_json((finished / "config.json").read_text("utf-8"))
    assert saved_config(finished) == cfg
    assert (cfg.parallel.data, cfg.train.num_steps) == (2, 120)
    manifest = json.loads((finished / "manifest.json").read_text("utf-8"))
    assert manifest["mesh"] == "data=2"
    assert manifest["attention"].startswith("reference (the others need an NVIDIA GPU")
    assert manifest["jax"] == jax.__version__
    assert {"device", "jaxlib", "parameters", "environment", "xla_flags"} <= manifest.keys()
    assert read_saved(finished).tokens_seen == 120 * 8 * 32
