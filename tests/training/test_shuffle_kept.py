"""A resumed run keeps the order of the sequences that it began with."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxpar import checkpoint
from jaxpar.checkpoint import integrity
from jaxpar.checkpoint.saved import METADATA
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.serialize import from_json
from jaxpar.data.shuffle import sequence_order
from jaxpar.training.run import Run


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of a finished run."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def of_before(copied) -> Path:
    """The same run as if an earlier version had written it, which named no order."""
    config = json.loads((copied / "config.json").read_text())
    del config["data"]["shuffle"]
    (copied / "config.json").write_text(json.dumps(config))
    for step in checkpoint.saved_steps(copied):
        folder = checkpoint.folder(copied) / str(step)
        metadata = json.loads((folder / METADATA).read_text())
        about = metadata["custom_metadata"]
        del about["config"]["data"]["shuffle"], about[integrity.SEAL]
        metadata["custom_metadata"] = integrity.seal(about)
        (folder / METADATA).write_text(json.dumps(metadata))
        integrity.write_file_list(folder)
    return copied


def continued(cfg: Config, only_devices) -> Run:
    """The run, ready to train on."""
    with only_devices(2):
        return Run(replace(cfg, **{"train.num_steps": 200}))


def first_rows(run: Run, shuffle: str) -> bool:
    """Whether the batches of a run follow an order."""
    (count,) = run.loader.sequences_per_epoch
    numbers = np.arange(40 * 8, 50 * 8)
    expected = sequence_order(count, run.cfg.train.seed, shuffle)(numbers)
    return np.array_equal(run.loader._sequences[0](numbers), expected)


def test_a_new_run_names_its_order(copied, only_devices):
    saved = from_json((copied / "config.json").read_text())
    assert saved.data.shuffle == "feistel"
    assert checkpoint.load_config(copied).data.shuffle == "feistel"
    run = continued(load_config(str(copied)), only_devices)
    assert run.cfg.data.shuffle == "feistel" and first_rows(run, "feistel")


@pytest.mark.parametrize("how", ["by its folder", "by its config", "by name"])
def test_a_run_of_an_earlier_version_keeps_grains_order(of_before, write_config, how, only_devices):
    if how == "by its folder":
        cfg = load_config(str(of_before))
    else:
        cfg = load_config(write_config(of_before.parent))
        assert cfg.data.shuffle == "auto"
    if how == "by name":
        cfg = replace(cfg, **{"data.shuffle": "grain"})
    run = continued(cfg, only_devices)
    assert run.first_step == 120 and run.cfg.data.shuffle == "grain"
    assert first_rows(run, "grain") and "data.shuffle" not in run.changed


def test_another_order_is_refused(of_before, write_config, only_devices):
    cfg = replace(load_config(write_config(of_before.parent)), **{"data.shuffle": "feistel"})
    with pytest.raises(ConfigError, match=r"data.shuffle = 'feistel': .* has 'grain'. Fix: use a"):
        continued(cfg, only_devices)
