"""Damaged checkpoints: every flipped bit is found, the step set aside, the one before used."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from jaxpar.checkpoint import inspection, integrity, loading, stored_arrays
from jaxpar.checkpoint.integrity import Damaged, Unreadable
from jaxpar.checkpoint.loading import restore, restore_latest
from jaxpar.checkpoint.saved import (
    METADATA,
    checkpoint_folder,
    read_saved,
    saved_steps,
    starting_step,
)
from jaxpar.commands import call
from jaxpar.config import ConfigError, json_reader
from tests.checkpoint.test_checkpoint import (
    DATA_2,
    TENSOR_2,
    VIRTUAL,
    assert_same_bits,
    base,
    logical,
    save,
    setup,
)
from tests.slow import slow, slow_but

__all__ = ["base", "setup"]  # fixtures

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

MESHES = {"data": DATA_2, "tensor": TENSOR_2, "virtual stages": VIRTUAL}


def step_folder(cfg, step: int) -> Path:
    return checkpoint_folder(cfg.run.dir) / str(step)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file, in place; twice, and it is as it was."""
    with open(file, "r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def random_bits(folder: Path, count: int, seed: int) -> list[tuple[Path, int]]:
    """Places in the files of a checkpoint, every byte as likely as another."""
    files = files_of(folder)
    ends = np.cumsum([file.stat().st_size for file in files])
    places = []
    for bit in np.random.default_rng(seed).integers(8 * ends[-1], size=count):
        file = int(np.searchsorted(ends, bit // 8, side="right"))
        before = 0 if file == 0 else int(ends[file - 1])
        places.append((files[file], int(bit) - 8 * before))
    return places


def test_fingerprints_do_not_depend_on_the_mesh(setup):
    found = []
    for mesh in MESHES.values():
        cfg, on = setup(**mesh)
        save(cfg, on, 3)
        found.append(read_saved(cfg.run.dir).fingerprints)
        shutil.rmtree(cfg.run.dir)
    assert found[0] == found[1] == found[2]
    assert {"step", "params/layers/wq", "opt_state/0/mu/layers/wq"} <= found[0].keys()


@pytest.mark.parametrize("count", [8, slow(100)])
def test_each_flipped_bit_is_found(setup, count):
    cfg, mesh = setup(**VIRTUAL)
    save(cfg, mesh, 3)
    reader, other = setup(**TENSOR_2)
    missed = []
    for file, bit in random_bits(step_folder(cfg, 3), count, seed=0):
        flip(file, bit)
        try:
            restore(reader, other)
            missed.append((file.name, bit))
        except Damaged:
            pass
        flip(file, bit)
    assert missed == []
    restore(reader, other)  # and whole again


# What Orbax was reading beside the array that failed is dropped, and says so at length.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", [20, 100])
def test_fingerprints_alone_let_no_wrong_number_through(setup, count):
    """Without the list of files, a flip is found, or what is loaded is what was saved."""
    cfg, mesh = setup()
    saved = save(cfg, mesh, 3)
    folder = step_folder(cfg, 3)
    (folder / integrity.FILES).unlink()
    found = 0
    for file, bit in random_bits(folder, count, seed=1):
        flip(file, bit)
        try:
            assert_same_bits(restore(cfg, mesh), saved)
        except (Damaged, ConfigError):  # the latter where jaxpar's own key is gone
            found += 1
        flip(file, bit)
    assert found > count / 2


def test_swapped_elements_are_found(setup):
    cfg, mesh = setup()
    save(cfg, mesh, 3)
    folder = step_folder(cfg, 3)
    (folder / integrity.FILES).unlink()
    data = max(files_of(folder), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    at = len(raw) // 2 // 4 * 4
    raw[at : at + 4], raw[at + 4 : at + 8] = raw[at + 4 : at + 8], raw[at : at + 4]
    data.write_bytes(raw)
    with pytest.raises(Damaged):
        restore(cfg, mesh)


@pytest.mark.parametrize("how", ["truncate", "delete"])
def test_a_truncated_or_missing_file_is_found(setup, how):
    """The marker files too, which Orbax does not miss."""
    cfg, mesh = setup()
    saved = save(cfg, mesh, 3)
    folder = step_folder(cfg, 3)
    kept = folder.parent.parent / "kept"
    shutil.copytree(folder, kept)
    for file in files_of(folder):
        if how == "delete":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size // 2)
        if (how, file.name) == ("delete", integrity.FILES):
            assert_same_bits(restore(cfg, mesh), saved)  # the arrays tell
        else:
            with pytest.raises(Damaged):
                restore(cfg, mesh)
        shutil.copy2(kept / file.relative_to(folder), file)


def damage_array(cfg, step: int) -> None:
    """Flip a bit in the middle of the largest file."""
    data = max(files_of(step_folder(cfg, step)), key=lambda file: file.stat().st_size)
    flip(data, 4 * data.stat().st_size)


def test_what_is_set_aside_has_a_place_of_its_own(tmp_path):
    def aside(why: str) -> str:
        (tmp_path / "100").mkdir()
        (tmp_path / "100" / "x").write_text(why)
        return integrity.set_aside(tmp_path, tmp_path / "100", why).name

    assert [aside(f"why {i}") for i in range(3)] == ["100", "100-1", "100-2"]
    damaged = tmp_path / "damaged"
    shutil.rmtree(damaged / "100-1")
    (damaged / "100-1.txt").unlink()
    assert [aside("why 3"), aside("why 4")] == ["100-1", "100-3"]
    for name, i in (("100", 0), ("100-1", 3), ("100-2", 2), ("100-3", 4)):
        assert (damaged / name / "x").read_text() == f"why {i}"
        assert (damaged / f"{name}.txt").read_text() == f"why {i}\n"


def test_a_damaged_step_is_set_aside_and_the_one_before_is_used(setup, capfd):
    cfg, mesh = setup()
    save(cfg, mesh, 2, 4)
    expected = logical(restore(cfg, mesh, 2), cfg)
    (step_folder(cfg, 4) / integrity.FILES).unlink()
    damage_array(cfg, 4)
    assert starting_step(cfg) == 4  # that reads no array
    reader, other = setup(**TENSOR_2)
    state, step = restore_latest(reader, other)
    assert step == 2
    assert_same_bits(logical(state, reader), expected)
    assert saved_steps(cfg.run.dir) == [2]
    told = capfd.readouterr().err
    assert "WARNING" in told and "step 4" in told and "has fingerprint" in told
    aside = Path(cfg.run.dir) / integrity.DAMAGED
    assert files_of(aside / "4") and "has fingerprint" in (aside / "4.txt").read_text()
    save(cfg, mesh, 4)  # the same step again, and damaged again
    damage_array(cfg, 4)
    assert starting_step(cfg) == 2  # its list of files tells
    restore_latest(cfg, mesh)
    assert sorted(p.name for p in aside.iterdir()) == ["4", "4-1", "4-1.txt", "4.txt"]


def test_without_a_whole_one_the_damage_is_named_and_nothing_is_moved(setup):
    cfg, mesh = setup()
    save(cfg, mesh, 2, 4)
    for step in (2, 4):
        damage_array(cfg, step)
    for attempt in (starting_step, lambda cfg: restore_latest(cfg, mesh)):
        with pytest.raises(Damaged, match=r"every checkpoint of .* step 2: .*; step 4: "):
            attempt(cfg)
    assert saved_steps(cfg.run.dir) == [2, 4]


# ------------------------------------------------------------- what is no damage


def test_a_file_that_is_too_many_is_a_warning(setup, capfd):
    """What a file browser or a backup leaves: nobody reads it."""
    cfg, mesh = setup()
    saved = save(cfg, mesh, 2, 4)
    (step_folder(cfg, 4) / ".DS_Store").touch()
    assert starting_step(cfg) == 4
    state, step = restore_latest(cfg, mesh)
    assert step == 4
    assert_same_bits(state, saved)
    assert "WARNING" in (told := capfd.readouterr().err) and ".DS_Store" in told
    assert call("checkpoint", ["verify", cfg.run.dir]) == 0
    told = capfd.readouterr().out
    assert "step 4: note: .DS_Store does not belong to this" in told and "step 4: intact" in told


NUMBERS = ["EMFILE", "ENFILE", "ENOMEM", "ESTALE", "ETIMEDOUT", "EACCES", "EPERM", "EINTR", "EIO"]


@pytest.mark.parametrize("name", slow_but(["EMFILE", "ESTALE"], NUMBERS))
def test_the_machines_own_trouble_moves_nothing(setup, monkeypatch, name):
    """In a small file that is opened, in one that is asked for its size, and in the loader."""
    cfg, mesh = setup()
    save(cfg, mesh, 2, 4)
    number = getattr(errno, name)

    def trouble(*_, **__):
        raise OSError(number, os.strerror(number), "some file")

    def wrapped(*_, **__):
        try:
            trouble()
        except OSError as error:
            raise ValueError("as Orbax would say it") from error

    for place, what in (
        ((json_reader, "_content"), trouble),
        ((integrity, "_size"), trouble),
        ((loading, "_load"), trouble),
        ((loading, "_load"), wrapped),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*place, what)
            with pytest.raises(Unreadable, match=f"cannot be read: .*{os.strerror(number)}"):
                restore_latest(cfg, mesh)
    assert saved_steps(cfg.run.dir) == [2, 4]
    assert not (Path(cfg.run.dir) / integrity.DAMAGED).exists()
    assert restore_latest(cfg, mesh)[1] == 4


def test_too_many_open_files_of_tensorstore_are_no_damage(setup, monkeypatch):
    """Its errors are no OSErrors."""
    cfg, mesh = setup()
    save(cfg, mesh, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def without_files(at, name):
        spec = stored_arrays.array_spec(stored_arrays.array_folder(at), name)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            return tensorstore.open(spec, read=True).result()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    monkeypatch.setattr(stored_arrays, "open_array", without_files)
    with pytest.raises(Unreadable, match="cannot be read: Too many open files"):
        call("checkpoint", ["verify", cfg.run.dir])


@pytest.mark.parametrize("name", ["fingerprints", "config", "tokens_seen", integrity.SEAL])
def test_metadata_that_lacks_something_is_damage_that_names_it(name, setup):
    cfg, mesh = setup()
    save(cfg, mesh, 2)
    file = step_folder(cfg, 2) / METADATA
    metadata = json.loads(file.read_text())
    about = {key: v for key, v in metadata["custom_metadata"].items() if key != integrity.SEAL}
    about.pop(name, None)
    about = about if name == integrity.SEAL else integrity.seal(about)
    file.write_text(json.dumps(metadata | {"custom_metadata": about}))
    integrity.write_file_list(step_folder(cfg, 2))
    with pytest.raises(Damaged, match=f"step 2 .*: its metadata has no {name}"):
        read_saved(cfg.run.dir)


# ------------------------------------------------------------------------------- the program


def test_ls_and_verify(setup, capsys):
    cfg, mesh = setup()
    save(cfg, mesh, 2, 4)
    assert call("checkpoint", ["verify", cfg.run.dir]) == 0
    assert "step 2: intact" in capsys.readouterr().out
    (step_folder(cfg, 4) / integrity.FILES).unlink()
    damage_array(cfg, 4)
    call("checkpoint", ["ls", cfg.run.dir])
    _, two, four = capsys.readouterr().out.splitlines()
    assert "data=2" in two and "files verified" in two and "no file list" in four
    assert call("checkpoint", ["verify", cfg.run.dir]) == 1
    told = capsys.readouterr().out
    assert "step 2: intact" in told and "step 4: DAMAGED" in told
    assert call("checkpoint", ["verify", cfg.run.dir, "--step", "2"]) == 0


@pytest.mark.parametrize("place", ["stat", "file_damage", "read_saved", "half"])
def test_ls_leaves_out_what_is_deleted_meanwhile(setup, monkeypatch, capsys, place):
    """Whatever it was just looking at; "half": a part is gone before, and the rest after."""
    cfg, mesh = setup()
    save(cfg, mesh, 2, 4)
    gone = step_folder(cfg, 2)
    delete = lambda: shutil.rmtree(gone, ignore_errors=True)  # noqa: E731

    def after_deleting(module, name: str, about: str) -> None:
        real = getattr(module, name)

        def look(*args, **kwargs):
            if about in map(str, args):
                delete()
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, look)

    if place == "half":
        stored_arrays.array_folder(gone).joinpath(stored_arrays.MANIFEST).unlink()
        rest = iter([lambda: (gone / METADATA).unlink(), delete])
        monkeypatch.setattr(inspection.time, "sleep", lambda _: next(rest)())
    elif place == "stat":
        after_deleting(Path, "is_file", str(gone / METADATA))
    elif place == "file_damage":
        after_deleting(integrity, place, str(gone))
    else:
        after_deleting(inspection, place, "2")
    capsys.readouterr()
    assert call("checkpoint", ["ls", cfg.run.dir]) == 0
    _, only = capsys.readouterr().out.splitlines()
    assert only.split()[0] == "4" and "files verified" in only and not gone.exists()


def test_wrong_arguments(setup, tmp_path):
    cfg, mesh = setup()
    save(cfg, mesh, 2)
    with pytest.raises(ConfigError, match=r"RUN = .* contains no checkpoint"):
        list(inspection.rows(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--step = 7: .* use one of 2"):
        call("checkpoint", ["verify", cfg.run.dir, "--step", "7"])


@pytest.mark.slow
def test_damage_ends_a_program_with_code_1_and_one_line(setup):
    """As a process; `test_ls_verify_and_diff` has the code and the text."""
    cfg, mesh = setup()
    save(cfg, mesh, 2)
    damage_array(cfg, 2)
    command = [sys.executable, "-m", "jaxpar.checkpoint", "verify", cfg.run.dir]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "DAMAGED" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr
