"""A small student learns from a run, resumes on another mesh, and is told what cannot teach it."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.branching import branch
from jaxpar.config import ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.features.distillation import SCORES
from jaxpar.features.distillation.teacher import keep
from jaxpar.parallel.context import order_of
from jaxpar.training.run import Run

STEPS = 16


def records(run: Path, name: str) -> dict[int, float]:
    """A metric of a run by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_a_student_learns_from_a_teacher_of_another_shape(
    train_on, write_config, finished, tmp_path
):
    config, run, again = write_config(tmp_path), tmp_path / "run", tmp_path / "again"
    flags = ["--distill.teacher", str(finished), "--distill.weight", "0.9"]
    flags += ["--distill.top-k", "16", "--model.num-layers", "1", "--model.d-model", "16"]
    flags += ["--train.num-steps", str(STEPS), "--checkpoint.every", "8"]
    flags += ["--optimizer.schedule", "constant", "--evaluation.every", "8"]
    assert train_on(2, config, *flags) == 0
    divergence, held_out = records(run, "distill_loss"), records(run, "held_out_loss")
    assert divergence[STEPS] < 0.7 * divergence[1] and held_out[STEPS] < held_out[8]
    branch(str(run), str(again), 8, print)
    assert train_on(4, config, *flags, "--run.dir", str(again), "--parallel.tensor", "2") == 0
    for name in ("loss", "distill_loss"):
        first, second = records(run, name), records(again, name)
        later = range(9, STEPS + 1)
        np.testing.assert_allclose([second[s] for s in later], [first[s] for s in later], 1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distill.teacher", "nowhere"], "is not a run with a checkpoint"),
        (["--model.vocab-size", "384"], "has a model of 272 tokens, and the student's has 384"),
        (
            ["--parallel.tensor", "4", "--model.layers.mixer.num-kv-heads", "4"],
            "this mesh cannot run: model.layers.mixer.num_kv_heads must be divisible",
        ),
    ],
)
def test_what_cannot_teach(flags, message, only_devices, write_config, finished, tmp_path):
    args = [write_config(tmp_path), "--distill.teacher", str(finished), *flags]
    with only_devices(4), pytest.raises(ConfigError, match=message):
        Run.open(read_config(args))


@pytest.mark.slow  # quicker: data/test_teacher_cache.py
def test_what_is_kept_is_what_the_teacher_says(only_devices, write_config, finished, tmp_path):
    """Of every sequence, once, on one mesh, and read on others; a stopped command continues."""
    flags = ["--distill.teacher", str(finished), "--distill.top-k", "5"]
    flags += ["--distill.temperature", "2.0", "--compute.dtype", "float32"]
    kept = [*flags, "--distill.cache", str(tmp_path / "cache")]
    config, said = write_config(tmp_path), []

    def read(*more: str):
        return read_config([config, *more])

    with only_devices(4):
        keep(read(*kept, "--parallel.sequence", "2", "--parallel.tensor", "2"), said.append)
        shards = sorted((tmp_path / "cache").glob("*.teacher"))
        whole = [shard.read_bytes() for shard in shards]
        assert shards and "kept" in said[-1]
        live = Run.open(read(*flags), in_folder=False)
        live.supplement.load(live, None)
        for more in ([], ["--parallel.sequence", "2"], ["--parallel.tensor", "2"]):
            run = Run.open(read(*kept, *more), in_folder=False)
            assert run.supplement is None and run.max_segments == live.max_segments
            for step in (0, 7):
                wanted, found = live.supplemented(live.loader.batch(step)), run.loader.batch(step)
                order = order_of(run.cfg)
                back = slice(None) if order is None else np.argsort(order)
                for of in (lambda batch: batch.tokens, lambda batch: batch.extra[SCORES]):
                    a, b = (np.asarray(of(batch)) for batch in (wanted, found))
                    np.testing.assert_allclose(b[:, back], a, rtol=1e-4, atol=1e-5)
        shards[0].unlink()
        keep(read(*kept, "--parallel.sequence", "2", "--parallel.tensor", "2"), said.append)
        assert [shard.read_bytes() for shard in shards] == whole
        keep(read(*kept), said.append)
        assert "0 tokens" in said[-1]
        with pytest.raises(ConfigError, match=r"has the 5 likeliest tokens of .*, not the 4 of"):
            keep(read(*kept, "--distill.top-k", "4"))
        with pytest.raises(ConfigError, match=r"distill.cache = '': is empty"):
            keep(read(*flags))
        about = tmp_path / "cache" / "about.json"
        about.write_text(about.read_text().replace('"teacher": "', '"teacher": "0'))
        with pytest.raises(ConfigError, match=r"has other weights than .*, which"):
            Run.open(read(*kept), in_folder=False)
        Run.open(read(*kept, "--distill.teacher", "gone"), in_folder=False)
