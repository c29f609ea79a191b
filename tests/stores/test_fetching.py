"""A run comes back from the store: to another host, to one that knows better, or to be read."""

import shutil

import pytest

from jaxpar.config import ConfigError
from jaxpar.stores import fetching, steps
from jaxpar.stores.fetching import StepsDamaged, fetch, for_reading
from tests.stores.folders import MARK, append, read_step, write_run, write_step
from tests.stores.test_mirror import mirrored


def fetched(store, folder, **more) -> None:
    folder.mkdir(exist_ok=True)
    fetch(store, folder, MARK, print, **more)


@pytest.fixture
def run(address, tmp_path):
    """A run with checkpoints 10 and 20, in the store."""
    write_run(tmp_path / "run", [10, 20])
    with mirrored(address, tmp_path / "run"):
        pass
    return tmp_path / "run"


def damage(store, step: int) -> None:
    store.write(f"checkpoints/{step}/state/d/0123", b"other")


def test_another_host_gets_files_lines_and_the_newest_checkpoint(run, store, tmp_path):
    fetched(store, tmp_path / "new")
    for name in ("config.json", "metrics.jsonl"):
        assert (tmp_path / "new" / name).read_bytes() == (run / name).read_bytes()
    assert read_step(tmp_path / "new", 20) == read_step(run, 20)
    assert not read_step(tmp_path / "new", 10)
    fetched(store, tmp_path / "new", step=10)
    assert read_step(tmp_path / "new", 10) == read_step(run, 10)


def test_a_new_run_has_nothing_to_download(store, tmp_path):
    fetched(store, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_what_a_killed_upload_left_on_the_host_is_kept(run, store, s3):
    """Nobody else has written since, so that the folder is ahead of the store."""
    append(run, 21, 22)
    write_step(run, 30)
    (run / "config.json").write_text("newer")
    before = (run / "metrics.jsonl").read_bytes()
    s3.requests.clear()
    fetched(store, run)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (run / "config.json").read_text() == "newer" and read_step(run, 30)
    assert not [path for method, path in s3.requests if "state/d" in path]


def test_what_another_host_has_written_since_wins(run, address, store, tmp_path, capsys):
    write_step(run, 30)  # never uploaded
    fetched(store, tmp_path / "b")
    append(tmp_path / "b", 21)
    write_step(tmp_path / "b", 25)
    with mirrored(address, tmp_path / "b"):
        pass
    append(run, 777)
    fetched(store, run)
    assert b"777" not in (run / "metrics.jsonl").read_bytes()
    assert read_step(run, 25) == read_step(tmp_path / "b", 25)
    assert read_step(run, 20) and not read_step(run, 30)
    assert (run / "superseded" / "30" / MARK).is_file()  # nothing is lost
    assert "is not a checkpoint of s3://" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run, store, tmp_path, capsys):
    damage(store, 20)
    fetched(store, tmp_path / "new")
    assert read_step(tmp_path / "new", 10) and not read_step(tmp_path / "new", 20)
    told = capsys.readouterr().err
    assert "step 20 of s3://" in told and "An earlier step is used instead" in told
    damage(store, 10)
    shutil.rmtree(tmp_path / "new")
    with pytest.raises(StepsDamaged, match=r"every checkpoint.*step 20:.*step 10:"):
        fetched(store, tmp_path / "new")


def test_a_checkpoint_without_its_list_does_not_exist(run, store, tmp_path):
    store.delete(["complete/20"])
    fetched(store, tmp_path / "new")
    assert read_step(tmp_path / "new", 10) and not read_step(tmp_path / "new", 20)


def test_a_copy_for_reading_follows_the_store(run, address, store):
    folder = for_reading("RUN", str(address), MARK, print)
    assert read_step(folder, 20) and not read_step(folder, 10)
    write_step(run, 20, seed=1)
    write_step(run, 30)
    append(run, 30)
    with mirrored(address, run):
        # Also while the run goes on.
        fetching_while = steps.complete_steps(store)
    assert fetching_while
    assert for_reading("RUN", str(address), MARK, print) == folder
    assert read_step(folder, 30) == read_step(run, 30)
    assert not read_step(folder, 20)  # outdated
    assert (folder / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"step = 15: is not a complete .*use one of 10, 20, 30"):
        for_reading("RUN", str(address), MARK, print, step=15)


def test_an_address_without_a_run_is_refused(address):
    for call in (
        lambda: for_reading("RUN", str(address), MARK, print),
        lambda: fetching.with_local_config([str(address)]),
    ):
        with pytest.raises(ConfigError, match="contains no run"):
            call()
