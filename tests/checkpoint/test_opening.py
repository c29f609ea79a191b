"""A path is what its user means, and what cannot be opened is not damaged."""

import itertools
import os
import shutil
from pathlib import Path

import pytest

from jaxpar.checkpoint import inspection, integrity, stored_arrays
from jaxpar.checkpoint.integrity import Damaged, Unreadable
from jaxpar.checkpoint.saved import checkpoint_folder, damage, saved_steps, starting_step
from jaxpar.commands import call, read
from jaxpar.config import replace
from jaxpar.runtime import exit_codes
from jaxpar.runtime.program import _verdict
from tests.another_user import as_another_user, open_folder
from tests.checkpoint.test_checkpoint import base, save, setup

__all__ = ["base", "setup"]  # fixtures

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


@pytest.fixture
def cfg(setup):
    """A run with the checkpoints of steps 2 and 4, in a folder that all users can reach."""
    with open_folder() as place:
        made, mesh = setup()
        made = replace(made, **{"run.dir": str(place / "run")})
        save(made, mesh, 2, 4)
        yield made


def test_a_path_is_what_the_system_takes_it_for(cfg, tmp_path, monkeypatch, capsys):
    run = Path(cfg.run.dir)
    (tmp_path / "here").mkdir()
    (run.parent / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(run.parent / "deep" / "er")
    (tmp_path / "run").symlink_to(run)
    (tmp_path / "x").mkdir()  # what is beside the link, and not beside its target
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    ways = (f"{run}/", f"{run.parent}//./run", f"{run}/../run", "../run", "~/run", "./../run/.")
    for way in (*ways, f"{tmp_path}/link/../../run"):
        assert inspection.verify(way, 4, lambda line: None), way
        assert call("checkpoint", ["verify", way, "--step", "4"]) == exit_codes.EXIT_OK, way
        assert [row.step for row in inspection.rows(way)] == [2, 4], way
        assert starting_step(replace(cfg, **{"run.dir": way})) == 4, way
    assert "DAMAGED" not in capsys.readouterr().out
    assert read("checkpoint", ["verify", f"{tmp_path}/link/../../run"]).run == str(run.resolve())
    assert read("checkpoint", ["verify", "./runs//a/"]).run == "runs/a"
    assert read("checkpoint", ["ls", "s3://bucket/runs/../a"]).run == "s3://bucket/runs/../a"


#: What another user has closed, and what may not be said of it.
CLOSED = ("checkpoints", "checkpoints/4", "checkpoints/4/state", "checkpoints/4/jaxpar_files.json")
CLOSED += ("checkpoints/4/_CHECKPOINT_METADATA", "")


@pytest.mark.slow
def test_what_may_not_be_read_is_no_damage_and_no_reason_for_another_step(cfg):
    for closed, mode in itertools.product(CLOSED, (0o000, 0o600)):
        place = Path(cfg.run.dir, closed)
        before = place.stat().st_mode
        place.chmod(mode)
        try:
            told = as_another_user(lambda: starting_step(cfg))
            verified = as_another_user(
                lambda: call("checkpoint", ["verify", cfg.run.dir, "--step", "4"])
            )
        finally:
            place.chmod(before)
        case = f"{closed or 'the run'} with mode {mode:o}"
        assert told.startswith("Unreadable: ") and "Permission denied" in told, (case, told)
        assert verified.startswith("Unreadable: "), (case, verified)


def test_a_folder_of_arrays_that_may_not_be_read_is_no_damage_without_a_list_of_files(cfg):
    step = checkpoint_folder(cfg.run.dir) / "4"
    (step / integrity.FILES).unlink()
    (state,) = (path for path in step.iterdir() if path.is_dir())
    state.chmod(0o000)
    told = as_another_user(lambda: stored_arrays.array_folder(step))
    state.chmod(0o755)
    assert told.startswith("PermissionError: ")


def test_verify_tells_damage_from_what_it_cannot_read_by_its_code(cfg, monkeypatch, capsys):
    metadata = checkpoint_folder(cfg.run.dir) / "4" / "_CHECKPOINT_METADATA"
    size = integrity._size

    def refused(file: Path) -> int | None:
        if file.parent.name == "2":
            raise PermissionError(13, "Permission denied", str(file))
        return size(file)

    monkeypatch.setattr(integrity, "_size", refused)
    with pytest.raises(Unreadable, match=r"2 cannot be read: .*Permission denied") as caught:
        call("checkpoint", ["verify", cfg.run.dir])
    told = capsys.readouterr().out
    assert "step 4: intact" in told and "DAMAGED" not in told  # the others are verified
    assert _verdict(caught.value)[0] == exit_codes.EXIT_UNREADABLE == 74
    metadata.write_bytes(metadata.read_bytes()[:-9])
    assert call("checkpoint", ["verify", cfg.run.dir]) == exit_codes.EXIT_ERROR
    told = capsys.readouterr().out
    assert "step 4: DAMAGED" in told and "step 2: DAMAGED" not in told


def test_a_link_to_a_disk_that_is_away_is_no_reason_for_another_step(cfg, tmp_path):
    step = checkpoint_folder(cfg.run.dir) / "4"
    shutil.move(step, tmp_path / "disk")
    step.symlink_to(tmp_path / "disk")
    assert starting_step(cfg) == 4
    shutil.move(tmp_path / "disk", tmp_path / "away")
    with pytest.raises(Unreadable, match="4 cannot be read: it is a link to a folder that is not"):
        starting_step(cfg)


def test_a_checkpoint_that_goes_away_while_it_is_read_is_not_damaged(cfg, monkeypatch):
    step = checkpoint_folder(cfg.run.dir) / "4"

    def gone(at: Path) -> list[str]:
        shutil.rmtree(at)
        raise FileNotFoundError(2, "No such file or directory", str(at))

    monkeypatch.setattr(stored_arrays, "array_names", gone)
    with pytest.raises(Unreadable, match=r"step 4 of .* went away while it was read"):
        inspection.verify(cfg.run.dir, 4, print)
    assert not step.exists()


@pytest.mark.parametrize("status", ["PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED"])
def test_trouble_that_tensorstore_names_is_no_damage(status):
    with pytest.raises(Unreadable, match=status):
        integrity.refuse_trouble("a checkpoint", ValueError(f"{status}: Error reading a file"))
    integrity.refuse_trouble("a checkpoint", ValueError("DATA_LOSS: Error reading a file"))


def test_missing_and_truncated_files_are_damage(cfg):
    file = next(
        path for path in (checkpoint_folder(cfg.run.dir) / "4").glob("*/d/*") if path.is_file()
    )
    os.truncate(file, 10)
    assert "has 10 bytes, not" in damage(cfg.run.dir, 4)[0]
    file.unlink()
    assert damage(cfg.run.dir, 4)[0].endswith("is missing")
    assert starting_step(cfg) == 2 and saved_steps(cfg.run.dir) == [2, 4]
    with pytest.raises(Damaged):
        inspection.require_whole(cfg.run.dir, 4)
