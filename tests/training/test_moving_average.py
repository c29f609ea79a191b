"""A moving average that a run turns on and off, and its export from bfloat16."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import read_saved, saved_config
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.convert.hf.exporting import open_export
from jaxpar.inference.load import load
from jaxpar.runtime import exit_codes
from jaxpar.sharding.mesh import make_mesh

WORDS = """--optimizer.ema.decay 0.6 --optimizer.ema.dtype {dtype} --optimizer.schedule constant
--checkpoint.every 1 --checkpoint.keep 9 --evaluation.every 2 --evaluation.num-batches 1
--train.num-steps 4 --optimizer.warmup-steps 0"""


@pytest.fixture(scope="module")
def train(train_on, write_config, tmp_path_factory):
    """(devices, run or None, further fields) -> the run's folder, trained to its end."""

    def to(number: int, run: Path | None = None, *more: str, dtype: str = "bfloat16") -> Path:
        folder = tmp_path_factory.mktemp("averaged") if run is None else run.parent
        words = WORDS.format(dtype=dtype).split()
        assert train_on(number, write_config(folder), *words, *more) == exit_codes.EXIT_OK
        return folder / "run"

    return to


def weights_of(run: Path, step: int, weights: str) -> traces.Arrays:
    cfg = saved_config(run, step)
    mesh = make_mesh(cfg.parallel, jax.devices()[: cfg.parallel.data])
    return traces.to_host(restore_params(run, cfg, mesh, step, weights))


@pytest.mark.slow
def test_turned_on_and_off_and_exported_from_bfloat16(train, capsys, tmp_path):
    quick = ("--evaluation.every", "0", "--train.num-steps")
    run = train(1, None, *quick, "1", "--optimizer.ema", "None", dtype="float32")
    assert not read_saved(run, 1).has_average
    with pytest.raises(ConfigError, match=r"step 1 .* has no moving average of the weights"):
        load(str(run), None, 1, print, weights="ema")
    train(1, run, *quick, "2")
    assert "the moving average begins with the weights of step 1" in capsys.readouterr().out
    before, after = weights_of(run, 1, "trained"), weights_of(run, 2, "trained")
    found, d = weights_of(run, 2, "ema"), np.float32(3 / 12)
    rounded = before["embed"].astype(jnp.bfloat16).astype(np.float32)
    wanted = d * rounded + (1 - d) * after["embed"]
    assert np.allclose(found["embed"], wanted, rtol=2**-7, atol=1e-6)

    arrays = open_export(run, 2, weights="ema").arrays
    values = arrays.read("embed", (slice(0, 9), slice(0, 9)))
    assert values.dtype == np.float32 and np.array_equal(values, found["embed"][:9, :9])
    arrays.compare_all()
    assert call("convert", ["to-hf", str(run), str(tmp_path / "hf"), "--weights", "ema"]) == 0

    train(1, run, *quick, "3", "--optimizer.ema", "None", dtype="float32")
    said = capsys.readouterr()
    assert "changed    optimizer.ema.decay: None, was 0.6" in said.out and not said.err
    assert not read_saved(run, 3).has_average and read_saved(run, 2).has_average
