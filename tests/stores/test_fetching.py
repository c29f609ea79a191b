"""A run comes back from the store: to another host, to one that knows better, or to be read."""

import shutil
from pathlib import Path

import pytest

from jaxpar.commands import read
from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.stores import reading, steps
from jaxpar.stores.fetching import StepsDamaged, fetch
from jaxpar.stores.reading import for_reading, with_local_runs
from tests.stores.folders import MARK, append, read_step, write_run, write_step
from tests.stores.test_mirror import mirrored


def fetched(store, folder, **more) -> None:
    folder.mkdir(exist_ok=True)
    fetch(store, folder, print, **more)


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
    assert b"777" in (run / "superseded" / "metrics.jsonl").read_bytes()
    assert "is not that of s3://" in capsys.readouterr().err


def test_a_folder_with_another_run_is_refused(run, store, tmp_path):
    write_run(tmp_path / "other", [5])
    before = (tmp_path / "other" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"run.dir = .*contains another run than s3://"):
        fetched(store, tmp_path / "other")
    assert (tmp_path / "other" / "metrics.jsonl").read_bytes() == before


def test_a_download_that_was_killed_goes_on(run, store, tmp_path):
    fetched(store, tmp_path / "new")
    shutil.rmtree(tmp_path / "new" / "checkpoints")
    fetched(store, tmp_path / "new")  # no session has begun there
    assert read_step(tmp_path / "new", 20) == read_step(run, 20)


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
    folder = for_reading("RUN", str(address), print)
    assert read_step(folder, 20) and not read_step(folder, 10)
    write_step(run, 20, seed=1)
    write_step(run, 30)
    append(run, 30)
    with mirrored(address, run):
        # Also while the run goes on.
        fetching_while = steps.complete_steps(store)
    assert fetching_while
    assert for_reading("RUN", str(address), print) == folder
    assert read_step(folder, 30) == read_step(run, 30)
    assert not read_step(folder, 20)  # outdated
    assert (folder / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"step = 15: is not a complete .*use one of 10, 20, 30"):
        for_reading("RUN", str(address), print, step=15)


def told(argv):
    return with_local_runs(read("convert", argv), print)


def test_commands_take_an_address_for_a_run(run, address, tmp_path):
    url = str(address)
    options = read("report", [url, "runs/other"])
    folder, other = with_local_runs(options, print, checkpoints=False).runs
    assert other == "runs/other" and not (tmp_path / folder / "checkpoints").exists()
    assert (tmp_path / folder / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
    for argv, step in ((["to-hf", url, "out"], 20), (["to-torch", url, "o.pt", "--step=10"], 10)):
        assert read_step(Path(told(argv).run), step) == read_step(run, step)
    assert told(["to-hf", "runs/a", "out"]).run == "runs/a"
    sampled = read("sample", [url, "--step", "20"])
    assert with_local_runs(sampled, print).run == folder


@pytest.mark.parametrize(
    ("command", "argv", "field"),
    [
        ("sample", ["--save"], "--save"),
        ("sample", ["--step", "best"], "--step"),
        ("evaluate", ["--split", "val", "--follow"], "--follow"),
        ("report", ["--watch", "5"], "--watch"),
    ],
)
def test_what_needs_the_run_itself_takes_no_address(address, command, argv, field):
    options = read(command, [str(address), *argv])
    with pytest.raises(ConfigError, match="but RUN is an address") as error:
        with_local_runs(options, print)
    assert error.value.field == field


def test_an_address_without_a_run_is_refused(address):
    for call in (
        lambda: for_reading("RUN", str(address), print),
        lambda: reading.with_local_config(ConfigArguments(str(address))),
    ):
        with pytest.raises(ConfigError, match="contains no run"):
            call()
