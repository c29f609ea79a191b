"""The lock of a run folder whose file is deleted while it is held."""

import json
import os
import shutil

import pytest

from jaxpar.runtime.files.lock import FILE, RunLock, RunLocked


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_deleted_lock_is_taken_again(tmp_path, capfd, what):
    run = tmp_path / "run"
    with RunLock(run) as lock:
        lock.check(at_once=True)
        if what == "file":
            (run / FILE).unlink()
        else:
            shutil.rmtree(run)
        lock.check()  # it looks once a second
        assert not (run / FILE).exists()
        lock.check(at_once=True)
        assert json.loads((run / FILE).read_text())["pid"] == os.getpid()
        assert "was deleted during the run; it was created and locked again" in (
            capfd.readouterr().err
        )
        lock.check(at_once=True)
        assert capfd.readouterr().err == ""
        with pytest.raises(RunLocked):
            RunLock(run, 0)
    RunLock(run, 0).release()


def test_a_lock_that_another_run_has_taken_meanwhile_is_lost(tmp_path):
    with RunLock(tmp_path) as lock:
        (tmp_path / FILE).unlink()
        with RunLock(tmp_path, 0) as other:
            for _ in range(2):
                with pytest.raises(RunLocked, match=f"process {os.getpid()} on .* locked a new"):
                    lock.check(at_once=True)
            other.check(at_once=True)


def test_the_lock_of_a_deleted_file_is_worth_nothing(tmp_path):
    """Of one that waited for it, while the holder has locked a new file."""
    holder, others = RunLock(tmp_path), []

    def deleted_meanwhile(_):
        (tmp_path / FILE).unlink()
        holder.check(at_once=True)

    with pytest.raises(RunLocked, match="locked a new"):
        others.append(RunLock(tmp_path, 5, deleted_meanwhile))
    holder.release()


def test_a_replaced_file_counts_as_deleted(tmp_path):
    with RunLock(tmp_path) as lock:
        (tmp_path / "new").touch()
        (tmp_path / "new").replace(tmp_path / FILE)
        lock.check(at_once=True)
        with pytest.raises(RunLocked):
            RunLock(tmp_path, 0)


def test_the_machines_trouble_loses_no_lock(tmp_path, monkeypatch, capfd):
    def stale(path):
        raise OSError(5, "Input/output error")

    with RunLock(tmp_path) as lock:
        (tmp_path / FILE).unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stale)
            lock.check(at_once=True)
        assert not (tmp_path / FILE).exists() and capfd.readouterr().err == ""
