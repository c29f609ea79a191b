"""Averages of checkpoints: the textbook mean, of any meshes, which every program reads."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar import checkpoint, evaluate
from jaxpar.checkpoint.__main__ import main
from jaxpar.checkpoint.averaging import Source, opened_weights, write_average
from jaxpar.checkpoint.inspection import verify
from jaxpar.checkpoint.integrity import Damaged
from jaxpar.config import ConfigError, replace
from jaxpar.config.command_line import read_config
from jaxpar.config.validate import resolve
from jaxpar.convert.__main__ import main as convert
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from jaxpar.training import initial_weights
from jaxpar.verification import traces
from tests.fingerprints import quickly_computed
from tests.weights import origin_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


def write_run(folder: Path, config_file: str, devices: int, seed: int, **fields) -> str:
    """A run with checkpoints of steps 1 to 3, of random numbers."""
    cfg = read_config([config_file, "--run.dir", str(folder)], "jaxpar.train", "")
    cfg = resolve(replace(cfg, **{"parallel.data": devices}, **fields), devices)
    mesh = make_mesh(cfg.parallel, jax.devices()[:devices])
    like, rng = state.abstract_logical(cfg, mesh), np.random.default_rng(seed)
    with quickly_computed(), checkpoint.Checkpointer(cfg) as saver:
        for step in (1, 2, 3):
            made = jax.tree.map(lambda a: (rng.normal(size=a.shape) / 9).astype(a.dtype), like)
            made = dataclasses.replace(made, step=np.int32(step))
            placed = jax.device_put(made, jax.tree.map(lambda a: a.sharding, like))
            assert saver.save(placed, step, tokens_seen=step)
    return str(folder)


@pytest.fixture(scope="module")
def runs(write_config, tmp_path_factory) -> tuple[str, str]:
    """Two runs of one model, on one device with an average, and on two. Tests must not write."""
    folder = tmp_path_factory.mktemp("runs")
    file = write_config(folder)
    average = {"optimizer.ema_decay": 0.5}
    return write_run(folder / "a", file, 1, 0, **average), write_run(folder / "b", file, 2, 1)


def weights_of(run: str | Path, step: int, weights: checkpoint.Weights = "trained"):
    cfg = replace(checkpoint.load_config(run, step), **{"parallel.data": 1})
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    found = traces.to_host(checkpoint.restore_params(run, cfg, mesh, step, weights))
    return {name: array.astype(np.float64) for name, array in found.items()}


def test_it_is_the_mean_of_the_weights(runs, tmp_path, capsys):
    one, two = runs
    mean = lambda *pairs: {n: sum(s * w[n] for s, w in pairs) for n in pairs[0][1]}  # noqa: E731
    last = [weights_of(one, step) for step in (1, 2, 3)]
    wanted = {
        "a": mean((0.25, last[2]), (0.75, weights_of(two, 3))),
        "b": mean(*((1 / 3, of_step) for of_step in last)),
        "c": mean((0.5, last[0]), (0.5, last[2])),
        "d": weights_of(one, 3, "ema"),
        "e": mean((0.5, last[0]), (0.5, weights_of(two, 2))),
    }
    commands = {
        "a": [one, two, "--weights", "1", "3"],
        "b": [one, "--last", "3"],
        "c": [one, "--steps", "1", "3"],
        "d": [one, "--ema"],
        "e": [one, two, "--steps", "1", "2"],
    }
    for name, words in commands.items():
        new = tmp_path / name
        folders = [word for word in words if word in runs]
        assert main(["merge", *folders, str(new), *words[len(folders) :]]) == 0
        found = weights_of(new, 0)
        assert found.keys() == wanted[name].keys()
        for path, array in wanted[name].items():
            assert np.array_equal(found[path], array.astype(np.float32)), (name, path)
    assert verify(new, None, print)
    assert f"25.00% step 3 of {one}, 75.00% step 3 of {two}" in capsys.readouterr().out


def test_every_program_reads_it(runs, tmp_path, config_file, capsys):
    new = tmp_path / "new"
    assert main(["merge", *runs, str(new)]) == 0
    evaluate.main([str(new), "--split", "val", "--sequences", "8"])
    assert "val loss" in capsys.readouterr().out
    assert convert(["to-hf", str(new), str(tmp_path / "hf")]) == 0
    cfg = read_config([config_file, "--run.init-from", str(new)], "jaxpar.train", "")
    cfg = replace(cfg, **{"parallel.data": 1})
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    started = initial_weights.state(cfg, mesh, origin_of(cfg), print)
    wanted = weights_of(new, 0)
    for name, array in traces.to_host(started.params).items():
        assert np.array_equal(array, wanted[name])
    with pytest.raises(ConfigError, match="contains imported weights in the checkpoint of step 0"):
        checkpoint.check_resumable(
            replace(cfg, **{"run.dir": str(new)}), checkpoint.read_saved(new)
        )
    (part, _) = json.loads((new / "checkpoints" / "0" / "_CHECKPOINT_METADATA").read_text())[
        "custom_metadata"
    ]["merged_from"]
    assert part == {"run": runs[0], "step": 3, "share": 0.5, "ema": False}


@pytest.mark.slow
def test_files_that_came_with_imported_weights_come_along(runs, tmp_path):
    assert convert(["to-hf", runs[0], str(tmp_path / "hf"), "--no-check"]) == 0
    for name in ("a", "b"):
        assert convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / name), "--no-check"]) == 0
    folders = [str(tmp_path / name) for name in ("a", "b", "c")]
    assert main(["merge", *folders]) == 0
    assert (tmp_path / "c" / "hf" / "tokenizer.json").is_file()
    assert (tmp_path / "c" / "hf" / "config.json").is_file()


def test_what_cannot_be_averaged_is_one_error_and_makes_nothing(runs, tmp_path, config_file):
    one, two = runs
    new = str(tmp_path / "new")
    other = write_run(tmp_path / "other", config_file, 1, 2, **{"model.d_ff": 32})
    adapted = write_run(tmp_path / "adapted", config_file, 1, 2, **{"lora.rank": 2})
    for words, said in (
        ([new], "needs RUN and NEW"),
        ([one, new], "is a single checkpoint"),
        ([one, one], "NEW = .*already exists"),
        ([one, one, new], "step 3 of .* is named twice"),
        ([one, other, new], "is another model than .* model.d_ff 32, not 64"),
        ([adapted, one, new], "has adapters, whose average is not"),
        ([one, adapted, new], "is another model than .* lora.rank 2, not 0"),
        ([one, str(tmp_path / "none"), new], "contains no finished checkpoint"),
        ([one, new, "--steps", "1", "7"], "is not a checkpoint of"),
        ([one, two, new, "--steps", "1"], "must have one step for each of the 2 runs"),
        ([one, two, new, "--last", "2"], "takes the checkpoints of a single run"),
        ([one, new, "--last", "4"], "has 3 checkpoints.*--last 3"),
        ([one, new, "--last", "1"], "--last = 1: must be at least 2"),
        ([one, two, new, "--weights", "1"], "must be one number for each of the 2"),
        ([one, two, new, "--weights", "1", "-1"], "must be finite numbers of at least 0"),
        ([one, two, new, "--weights", "0", "0"], "must be finite numbers of at least 0"),
        ([one, two, new, "--weights", "1", "nan"], "must be finite numbers of at least 0"),
        ([one, two, new, "--ema"], "step 3 of .* has no moving average"),
        ([one, two, "gs://bucket/new"], "bucket/new.*gs:// is not supported"),
        ([one, two, str(Path(config_file) / "new")], "is a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            main(["merge", *words])
    assert not Path(new).exists() and not list(tmp_path.glob(".new*"))


def test_damage_that_only_the_values_show(runs, tmp_path):
    saved = checkpoint.read_saved(runs[0], 3)
    wrong = saved.fingerprints | {"params/layers/wq": "0" * 16}
    sources = [
        Source(checkpoint.folder(runs[0]) / "3", 0.5, known)
        for known in (wrong, saved.fingerprints)
    ]
    opened = [opened_weights(source, ema=False) for source in sources]
    about = {"config": saved.config, "dataset": "", "versions": {}, "tokens_seen": 0}
    with pytest.raises(Damaged, match="params/layers/wq has fingerprint"):
        write_average(tmp_path / "new", sources, opened, about, print)
    del opened[1]["final_norm"]
    with pytest.raises(Damaged, match="does not contain params/final_norm"):
        write_average(tmp_path / "new2", sources, opened, about, print)
