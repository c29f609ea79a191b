"""The lock of a run folder whose file is deleted while it is held."""

import shutil

import pytest

from jaxpar.runtime.files import run_lock
from jaxpar.runtime.files.run_lock import FILE, RunLock, RunLocked


@pytest.mark.parametrize("what", ["file", "folder", "replaced"])
def test_a_deleted_lock_is_lost(tmp_path, what):
    run = tmp_path / "run"
    with RunLock(run) as lock:
        lock.check(at_once=True)
        if what == "folder":
            shutil.rmtree(run)
        else:
            (run / FILE).unlink()
        if what == "replaced":
            (run / FILE).touch()
        lock.check()  # it looks once a second
        for _ in range(2):
            with pytest.raises(RunLocked, match="was deleted during the run, which stops without"):
                lock.check(at_once=True)
    RunLock(run, 0).release()


def test_the_lock_of_a_deleted_file_is_worth_nothing(tmp_path):
    """Of one that waited for it, while another has locked a new file."""
    holder, others = RunLock(tmp_path), []

    def deleted_meanwhile(_):
        (tmp_path / FILE).unlink()
        others.append(RunLock(tmp_path, 0))
        holder.release()

    with pytest.raises(RunLocked, match="was deleted"):
        RunLock(tmp_path, 5, deleted_meanwhile)
    others[0].release()


def test_the_machines_trouble_loses_no_lock(tmp_path, monkeypatch):
    def stale(path):
        raise OSError(5, "Input/output error")

    with RunLock(tmp_path) as lock, monkeypatch.context() as patch:
        patch.setattr(run_lock.os, "stat", stale)
        lock.check(at_once=True)
