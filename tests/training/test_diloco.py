"""A run with DiLoCo: it resumes with the same bits anywhere, and readers get its outer weights."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.api.loading import load_config
from jaxpar.api.trainer import Trainer
from jaxpar.certification import replay
from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import read_saved, saved_config
from jaxpar.commands import call
from jaxpar.convert.hf.exporting import open_export
from jaxpar.runtime import exit_codes
from jaxpar.sharding.mesh import make_mesh
from tests.slow import slow

pytestmark = pytest.mark.slow  # quicker: meshes/test_diloco.py, checkpoint/test_replicas.py

FIELDS = """--parallel.replica 2 --diloco.every 4 --diloco.fragments 2 --train.num-steps 7
--checkpoint.every 3 --checkpoint.keep 9 --evaluation.every 0
--optimizer.warmup-steps 0"""

#: Checkpoint 3 is saved between two parts of an exchange.
OVERLAP = "--diloco.overlap", "2"


@pytest.fixture(scope="module")
def train(train_on, write_config):
    """(folder, further fields) -> its run, trained to its end on two devices."""

    def to(folder: Path, *more: str) -> Path:
        assert train_on(2, write_config(folder), *FIELDS.split(), *more) == exit_codes.EXIT_OK
        return folder / "run"

    return to


@pytest.fixture(scope="module", params=[pytest.param(OVERLAP, id="overlap"), slow((), id="none")])
def fields(request) -> tuple[str, ...]:
    """Further fields of the run."""
    return request.param


@pytest.fixture(scope="module")
def run(train, fields, tmp_path_factory) -> Path:
    """A run to step 7, with checkpoints of steps 3 and 6. Tests must not write to it."""
    return train(tmp_path_factory.mktemp("diloco"), *fields)


def test_resumes_with_the_same_bits_between_outer_steps(run, train, fields, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(run, again)
    for step in (6, 7):
        shutil.rmtree(again / "checkpoints" / str(step))
    train(tmp_path, *fields)
    for step in (6, 7):
        assert read_saved(again, step).fingerprints == read_saved(run, step).fingerprints
    assert read_saved(run, 6).fingerprints != read_saved(run, 3).fingerprints


def test_steps_by_hand_and_taken_again(run, fields, only_devices, write_config, tmp_path):
    """A trainer's steps and a replay have the same programs as the loop."""
    words = [word.removeprefix("--").replace("-", "_") for word in (*FIELDS.split(), *fields)]
    values = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    with only_devices(2):
        again = replay.replay(replay.ReplayOptions(run=str(run), step=6))
        assert again == "nothing wrong: the step repeats bit for bit"
        trainer = Trainer(load_config(write_config(tmp_path), values))
        state = trainer.init()
        for batch in trainer.batches(state):
            state, _ = trainer.step(state, batch)
        saved = trainer.save(state)
    whole = read_saved(run, 7).fingerprints
    assert read_saved(saved.parent.parent, 7).fingerprints == whole


def test_readers_get_the_outer_weights(run, tmp_path):
    saved = read_saved(run, 7)
    own = {k.removeprefix("diloco/weights/") for k in saved.fingerprints if "weights/" in k}
    assert {f"params/{k}" for k in own} <= set(saved.fingerprints)
    cfg = saved_config(run, 7)
    arrays = open_export(run, 7).arrays
    values = arrays.read("embed", (slice(0, 9), slice(0, 9)))
    mesh = make_mesh(cfg.parallel, jax.devices()[:2])
    outer = restore_params(run, cfg, mesh, 7)
    assert np.array_equal(values, np.asarray(outer["embed"])[:9, :9])
    assert call("convert", ["to-hf", str(run), str(tmp_path / "hf")]) == 0
