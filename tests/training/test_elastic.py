"""Runs that go on with other devices: the planner's mesh, the same global batch, the same order."""

import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpar.checkpoint.saved import read_saved
from jaxpar.config import BatchSize, Config, ConfigError, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.serialize import from_json
from jaxpar.config.validate import resolve
from jaxpar.runtime import exit_codes
from jaxpar.training import elastic
from tests import ranks

pytestmark = pytest.mark.waits

AUTO = ("--parallel.auto", "all")


def used(run):
    """The parallel section of a run's config.json."""
    return from_json((run / "config.json").read_text()).parallel


@pytest.fixture(scope="module")
def killed(write_ranks, tmp_path_factory):
    """A run on four devices, on the planner's mesh, killed after step 12: its config file."""
    folder = tmp_path_factory.mktemp("killed")
    config = write_ranks(folder)
    process = ranks.launch(1, 4, "--restarts", "0", "--", config, *AUTO, FAULT="0 13 SIGKILL")
    code, said = ranks.finish(process)
    assert code == 128 + signal.SIGKILL, said[-3000:]
    assert "layout     " in said and "fit 4 x cpu (planned as h200)" in said
    return config


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_a_killed_run_goes_on_with_other_devices(
    devices, killed, whole, train_on, write_ranks, tmp_path, capfd
):
    run = tmp_path / "run"
    shutil.copytree(killed.replace("tiny.py", "run"), run)
    assert train_on(devices, write_ranks(tmp_path), *AUTO) == exit_codes.EXIT_OK
    said = capfd.readouterr().out
    assert f"fit {devices} x cpu (planned as h200)" in said
    assert "restored step 5" in said or "restored step 10" in said  # the second may be cut short
    p = used(run)
    assert p.pipeline * p.replica * p.data * p.sequence * p.tensor == devices and p.auto == ""
    assert ranks.batches_of(run) == ranks.batches_of(whole)
    found, wanted = ranks.losses_of(run), ranks.losses_of(whole)
    assert sorted(found) == sorted(wanted) == list(range(1, 41))
    np.testing.assert_allclose([found[i] for i in range(1, 41)], list(wanted.values()), rtol=1e-4)


@pytest.mark.slow  # quicker: a microbatch is as large as before, below
@pytest.mark.usefixtures("quick_compile")
def test_microbatches_follow_the_devices(train_on, write_ranks, tmp_path, capfd):
    config, run = write_ranks(tmp_path), tmp_path / "run"
    flags = (config, "--evaluation.every", "0", "--optimizer.schedule", "constant")
    for devices, steps, microbatches in ((4, 11, 1), (2, 12, 2), (2, 13, 2)):
        more = ("--train.num-steps", str(steps))
        assert train_on(devices, *flags, *more) == exit_codes.EXIT_OK
        assert used(run).num_microbatches == microbatches
        told = "changed    parallel.num_microbatches: 2, not 1" in capfd.readouterr().out
        assert told == (microbatches == 2)
    assert read_saved(run, 13).asked == {"parallel.num_microbatches": 1}
    batches = ranks.batches_of(run)
    assert [batches[step][0] for step in sorted(batches)] == list(range(13))
    with pytest.raises(ConfigError, match=r"global_batch_size = 8: is that of .* 16 ways.*auto"):
        train_on(16, *flags, "--train.num-steps", "14")


# ------------------------------------------------------------------------------- the parts


def choice(only_devices, number: int, **values) -> Config:
    cfg = replace(load_config("quickstart"), **{"parallel.auto": ("all",)} | values)
    with only_devices(number):
        return elastic.choose_layout(cfg, 10)


def test_what_is_set_is_kept(only_devices, capsys):
    cfg = choice(only_devices, 8, **{"parallel.tensor": 2, "parallel.remat": "full"})
    assert (cfg.parallel.tensor, cfg.parallel.remat, cfg.parallel.auto) == (2, "full", ())
    assert "; kept: tensor 2, remat full" in capsys.readouterr().out
    assert resolve(cfg, 8) == cfg

    cfg = choice(only_devices, 8, **{"parallel.auto": ("replica", "data"), "parallel.zero": 3})
    p = cfg.parallel
    assert (p.tensor, p.sequence, p.pipeline, p.remat, p.zero) == (1, 1, 1, "dots", 3)
    assert p.replica * p.data == 8


def test_without_a_request_nothing_is_chosen(only_devices):
    cfg = load_config("quickstart")
    assert elastic.choose_layout(cfg, 10) is cfg


def test_what_cannot_be_chosen_is_refused(only_devices):
    with pytest.raises(ConfigError, match=r"auto\[1\] = 'mesh': .*--parallel.auto tensor\."):
        resolve(replace(Config(), **{"parallel.auto": ("tensor", "mesh")}), 1)
    with pytest.raises(ConfigError, match=r"parallel.auto = '3 x cpu.*allows no valid mesh"):
        choice(only_devices, 3, **{"parallel.tensor": 2})
    huge = {"model.num_layers": 64, "model.d_model": 1 << 13}
    huge |= {"model.layers.feed_forward.d_ff": 1 << 22}
    with pytest.raises(ConfigError, match=r"parallel.auto = .*not enough: the smallest layout"):
        choice(only_devices, 2, **huge)


def saved(ways: int, microbatches: int, asked: int | None = None, **parallel: int):
    """What a checkpoint of 64 rows says of its layout."""
    section = {"data": ways, "num_microbatches": microbatches} | parallel
    told = {} if asked is None else {"parallel.num_microbatches": asked}
    config = {"parallel": section, "train": {"global_batch_size": 64}}
    return SimpleNamespace(config=config, asked=told)


@pytest.mark.parametrize(
    ("before", "devices", "fields", "microbatches"),
    [
        (saved(8, 4), 8, {}, 4),
        (saved(8, 4), 4, {}, 8),  # as many rows each
        (saved(8, 4), 16, {}, 2),
        (saved(8, 4), 64, {}, 1),
        (saved(4, 8, asked=4), 4, {}, 8),  # and again after a restart
        (saved(8, 2), 4, {}, 4),  # another number is asked for: as asked
        (saved(8, 4), 8, {"tensor": 2}, 4),  # each row is cut in two
        (saved(8, 4), 8, {"pipeline": 2}, 8),
        (None, 4, {}, 4),
    ],
)
def test_a_microbatch_is_as_large_as_before(before, devices, fields, microbatches):
    values = {f"parallel.{name}": size for name, size in fields.items()}
    asked = {"parallel.num_microbatches": 4, "train.global_batch_size": 64}
    cfg = replace(Config(), **values, **asked)
    assert elastic.same_rows(cfg, before, devices).parallel.num_microbatches == microbatches


def test_every_batch_of_a_schedule_has_whole_microbatches():
    asked = {"parallel.num_microbatches": 4, "train.global_batch_size": 64}
    cfg = replace(
        Config(),
        **asked,
        **{"train.batch_schedule": (BatchSize(0, 16), BatchSize(9, 48), BatchSize(20, 64))},
    )
    found = [elastic.same_rows(cfg, saved(8, 4), devices) for devices in (4, 8, 16)]
    assert [one.parallel.num_microbatches for one in found] == [8, 4, 4]
    resolve(found[0], 4)
    with pytest.raises(ConfigError, match=r"batch_schedule = '0:16.* 32 devices cannot divide"):
        elastic.same_rows(cfg, saved(8, 4), 32)


def test_a_microbatch_of_a_given_size_keeps_it():
    asked = {"train.micro_batch_size": 2, "train.global_batch_size": 64}
    cfg = replace(Config(), **asked)
    assert elastic.same_rows(cfg, saved(8, 4, asked=1), 4) == cfg
    assert resolve(cfg, 4).parallel.num_microbatches == 8
