"""A run whose folder is in a store: trained, lost, and continued on another host, bit by bit."""

import json
import shutil

import pytest

from jaxpar.checkpoint.saved import checkpoint_folder, saved_steps
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.rules.paths import local_folder, with_store
from jaxpar.config.validate import check
from jaxpar.runtime import exit_codes
from jaxpar.stores import steps
from jaxpar.stores.mirror import Mirror

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


def losses(run_dir) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            found.setdefault(record["step"], []).append(record["loss"])
    return found


@pytest.mark.slow  # quicker: test_mirror.py, test_fetching.py
def test_a_run_continues_from_the_store_alone(address, store, train_on, config_file, capfd):
    url, here = str(address), local_folder(address, "runs")
    args = ("--train.num-steps=20", "--checkpoint.every=10", "--evaluation.every=0")
    assert train_on(2, config_file, f"--run.dir={url}", *args) == exit_codes.EXIT_OK
    assert steps.complete_steps(store) == [10, 20] == saved_steps(here)
    assert f"store      {url}, uploaded from {here}" in capfd.readouterr().out
    steps.delete_step(store, 20)
    shutil.rmtree(here)  # the host is gone
    assert train_on(2, url) == exit_codes.EXIT_OK
    told = capfd.readouterr().out
    assert "download   step 10, " in told and "restored step 10" in told
    assert steps.complete_steps(store) == [10, 20] == saved_steps(here)
    both = losses(here)
    assert sorted(both) == list(range(1, 21))
    assert all(len(both[step]) == 2 and len(set(both[step])) == 1 for step in range(11, 21))
    assert steps.is_same(store, here, 20) and checkpoint_folder(here).is_dir()


def test_an_address_in_run_dir_is_short_for_a_store_and_a_folder(address):
    cfg = with_store(replace(Config(), **{"run.dir": f"{address}/"}))
    assert cfg.run.store == str(address) and cfg.run.dir == str(local_folder(address, "runs"))
    check(cfg)
    assert with_store(cfg) == cfg
    with pytest.raises(ConfigError, match=r"is an address, but run.store is s3://other"):
        with_store(replace(Config(), **{"run.dir": str(address), "run.store": "s3://other/a"}))


@pytest.mark.parametrize("url", ["s3://", "s3://b", "s3://bucket/", "gs://bucket/a b", "az://x/y"])
def test_other_addresses_are_refused(url):
    with pytest.raises(ConfigError, match=r"run.store = .*must be s3://BUCKET/PREFIX"):
        check(replace(Config(), **{"run.store": url}))


def test_a_bucket_that_does_not_exist_is_refused_before_anything_is_written(
    address, train_on, config_file, capfd
):
    url = f"s3://no-such-bucket/{address.prefix}"
    with pytest.raises(ConfigError, match=r"run.store = .*bucket that does not exist"):
        train_on(2, config_file, f"--run.dir={url}")
    assert not local_folder(address._replace(bucket="no-such-bucket"), "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_refused_run_leaves_no_lease(address, store, train_on, config_file, there):
    """What only the data and the mesh show is found with the lease held."""
    args = (config_file, f"--run.dir={address}", "--train.num-steps=2", "--evaluation.every=0")
    if there:
        assert train_on(2, *args) == exit_codes.EXIT_OK
    before = {one.name for one in store.names()}
    with pytest.raises(ConfigError, match=r"data.path = .*does not exist"):
        train_on(2, *args, "--data.path=data/none", "--train.num-steps=4")
    after = {one.name for one in store.names()}
    assert after == before
    assert there or not local_folder(address, "runs").exists()
    assert train_on(2, *args, "--train.num-steps=4") == exit_codes.EXIT_OK  # without a wait


@pytest.mark.slow
def test_the_backlog_is_a_metric(address, train_on, config_file, monkeypatch):
    monkeypatch.setattr(Mirror, "_upload", lambda self, step: None)
    monkeypatch.setattr(Mirror, "drain", lambda self, seconds=0.0: True)
    args = ("--train.num-steps=6", "--checkpoint.every=2", "--evaluation.every=0")
    assert train_on(2, config_file, f"--run.dir={address}", *args) == exit_codes.EXIT_OK
    lines = (local_folder(address, "runs") / "metrics.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if "loss" in record]
    assert all("store_waiting_steps" in record for record in found)
    last = found[-1]
    assert last["store_waiting_steps"] >= 1 and last["store_waiting_seconds"] > 0
    assert last["store_waiting_gb"] > 1e-6
    assert found[0]["store_waiting_steps"] == 0
