"""Averages of checkpoints: the textbook mean, which every program reads."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.checkpoint.averaging import AveragedCheckpoint, opened_weights, write_average
from jaxpar.checkpoint.inspection import verify
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.checkpoint.loading import check_resumable, restore_params
from jaxpar.checkpoint.saved import CARRIED, checkpoint_folder, read_saved, saved_config
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.commands import call
from jaxpar.config import ConfigError, replace
from jaxpar.config.command_line import read_config
from jaxpar.config.schema.optimizer import Weights
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from jaxpar.training import initial_weights
from tests.fingerprints import quickly_computed
from tests.weights import origin_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


def write_run(folder: Path, config_file: str, devices: int, seed: int, **fields) -> str:
    """A run with checkpoints of steps 1 to 3, of random numbers."""
    cfg = read_config([config_file, "--run.dir", str(folder)])
    cfg = resolve(replace(cfg, **{"parallel.data": devices}, **fields), devices)
    mesh = make_mesh(cfg.parallel, jax.devices()[:devices])
    like, rng = state.abstract_logical(cfg, mesh), np.random.default_rng(seed)
    with quickly_computed(), Checkpointer(cfg) as saver:
        for step in (1, 2, 3):
            made = jax.tree.map(lambda a: (rng.normal(size=a.shape) / 9).astype(a.dtype), like)
            made = dataclasses.replace(made, step=np.int32(step))
            placed = jax.device_put(made, jax.tree.map(lambda a: a.sharding, like))
            assert saver.save(placed, step, tokens_seen=step)
    return str(folder)


@pytest.fixture(scope="module")
def run(write_config, tmp_path_factory) -> str:
    """A run on two devices, with a moving average. Tests must not write."""
    folder = tmp_path_factory.mktemp("runs")
    average = {"optimizer.ema.decay": 0.5}
    return write_run(folder / "a", write_config(folder), 2, 0, **average)


def weights_of(run: str | Path, step: int, weights: Weights = "trained"):
    cfg = replace(saved_config(run, step), **{"parallel.data": 1})
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    found = traces.to_host(restore_params(run, cfg, mesh, step, weights))
    return {name: array.astype(np.float64) for name, array in found.items()}


def test_it_is_the_mean_of_the_weights(run, tmp_path, capsys):
    mean = lambda *of: {name: sum(w[name] for w in of) / len(of) for name in of[0]}  # noqa: E731
    saved = [weights_of(run, step) for step in (1, 2, 3)]
    averages = [weights_of(run, step, "ema") for step in (1, 2, 3)]
    wanted = {
        "a": (mean(*saved), ["--last", "3"]),
        "b": (mean(saved[0], saved[2]), ["--steps", "1", "3"]),
        "c": (averages[2], ["--weights", "ema"]),
        "d": (mean(*averages[1:]), ["--weights", "ema", "--last", "2"]),
    }
    for name, (of, words) in wanted.items():
        new = tmp_path / name
        assert call("checkpoint", ["average", run, str(new), *words]) == 0
        found = weights_of(new, 0)
        assert found.keys() == of.keys()
        for path, array in of.items():
            assert np.array_equal(found[path], array.astype(np.float32)), (name, path)
    assert verify(new, None, print)
    assert f"the moving averages of steps 2, 3 of {run}" in capsys.readouterr().out


def test_every_program_reads_it(run, tmp_path, config_file, capsys):
    new = tmp_path / "new"
    assert call("checkpoint", ["average", run, str(new), "--last", "2"]) == 0
    call("evaluate", [str(new), "--split", "val", "--sequences", "8"])
    assert "val loss" in capsys.readouterr().out
    assert call("convert", ["to-hf", str(new), str(tmp_path / "hf")]) == 0
    cfg = read_config([config_file, "--run.init-from", str(new)])
    cfg = replace(cfg, **{"parallel.data": 1})
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    started = initial_weights.state(cfg, mesh, origin_of(cfg), print)
    wanted = weights_of(new, 0)
    for name, array in traces.to_host(started.params).items():
        assert np.array_equal(array, wanted[name])
    with pytest.raises(ConfigError, match="contains imported weights in the checkpoint of step 0"):
        check_resumable(replace(cfg, **{"run.dir": str(new)}), read_saved(new))
    metadata = json.loads((new / "checkpoints" / "0" / "_CHECKPOINT_METADATA").read_text())
    origin = {"run": run, "steps": [2, 3], "weights": "trained"}
    assert metadata["custom_metadata"]["averaged_from"] == origin


def test_files_that_came_with_imported_weights_come_along(run, tmp_path):
    copy, new = tmp_path / "copy", tmp_path / "new"
    shutil.copytree(run, copy)
    (copy / CARRIED).mkdir()
    (copy / CARRIED / "tokenizer.json").write_text("{}")
    assert call("checkpoint", ["average", str(copy), str(new), "--last", "2"]) == 0
    assert (new / CARRIED / "tokenizer.json").read_text() == "{}"


def test_what_cannot_be_averaged_is_one_error_and_makes_nothing(run, tmp_path, config_file):
    new = str(tmp_path / "new")
    plain = write_run(tmp_path / "plain", config_file, 1, 2)
    adapted = write_run(tmp_path / "adapted", config_file, 1, 2, **{"lora.rank": 2})
    for words, said in (
        ([run, new], "averaged over a single checkpoint"),
        ([run, run, "--last", "2"], "NEW = .*already exists"),
        ([run, new, "--steps", "3", "3"], "names step 3 twice"),
        ([adapted, new, "--last", "2"], "has adapters, whose average is not"),
        ([str(tmp_path / "none"), new], "contains no finished checkpoint"),
        ([run, new, "--steps", "1", "7"], "is not a checkpoint of"),
        ([run, new, "--last", "2", "--steps", "1"], "--last = 2: chooses the checkpoints"),
        ([run, new, "--last", "4"], "has 3 checkpoints.*--last 3"),
        ([run, new, "--last", "1"], "--last = 1: must be at least 2"),
        ([plain, new, "--weights", "ema"], "step 3 of .* has no moving average"),
        ([run, "gs://bucket/new", "--last", "2"], "bucket/new.*gs:// is not supported"),
        ([run, str(Path(config_file) / "new"), "--last", "2"], "is a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            call("checkpoint", ["average", *words])
    assert not Path(new).exists() and not list(tmp_path.glob(".new*"))


def test_damage_that_only_the_values_show(run, tmp_path):
    saved = read_saved(run, 3)
    wrong = saved.fingerprints | {"params/layers/wq": "0" * 16}
    sources = [
        AveragedCheckpoint(checkpoint_folder(run) / "3", known)
        for known in (wrong, saved.fingerprints)
    ]
    opened = [opened_weights(source, weights="trained") for source in sources]
    about = {"config": saved.config, "dataset": "", "versions": {}, "tokens_seen": 0}
    with pytest.raises(Damaged, match="params/layers/wq has fingerprint"):
        write_average(tmp_path / "new", sources, opened, about, print)
    del opened[1]["final_norm"]
    with pytest.raises(Damaged, match="does not contain params/final_norm"):
        write_average(tmp_path / "new2", sources, opened, about, print)
