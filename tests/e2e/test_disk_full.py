"""A process whose disk fills up in the middle of a save: loud, within a budget, then code 1."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.checkpoint.saved import checkpoint_folder
from jaxpar.config.command_line import read_config
from jaxpar.config.serialize import to_json
from jaxpar.runtime import exit_codes
from tests.e2e.test_train import environment_of_start, losses_of
from tests.slow import slow

pytestmark = pytest.mark.waits

#: Runs a command on a file system of its own, in memory and of a given size, on a given folder, and
#: copies what it holds in the end. Nobody else sees it, and it ends with the command.
ON_SMALL_DISK = """
mount -t tmpfs -o size="$1" small "$2" || exit 99
folder=$2 copy=$3
shift 3
"$@"
code=$?
cp -r "$folder/run" "$copy"
exit $code
"""

STEPS = "--train.num-steps 60 --checkpoint.every 12 --evaluation.every 0".split()


def on_small_disk(size: int, folder: Path, copy: Path, *command: str):
    """A program of Python's on a disk of so many bytes at `folder`."""
    shell = ["unshare", "-rm", "sh", "-c", ON_SMALL_DISK, "sh", str(size), str(folder), str(copy)]
    return subprocess.run(
        [*shell, sys.executable, *command],
        env=environment_of_start(),
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module", autouse=True)
def may_mount(tmp_path_factory) -> None:
    there = tmp_path_factory.mktemp("disk")
    shell = ["unshare", "-rm", "mount", "-t", "tmpfs", "small", str(there)]
    try:
        done = subprocess.run(shell, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")


def bytes_on_disk(folder: Path) -> int:
    """Of all files, in whole pages."""
    return sum(-(-f.stat().st_size // 4096) * 4096 for f in folder.rglob("*") if f.is_file())


@pytest.mark.slow  # quicker: checkpoint/test_failures.py
def test_a_disk_that_fills_in_a_save(train_on, config_file, tmp_path, capfd):
    disk, run, one_save = tmp_path / "disk", tmp_path / "run", tmp_path / "one_save"
    disk.mkdir()
    once = ("--train.num-steps", "12", "--optimizer.warmup-steps", "1", "--run.dir", str(one_save))
    assert train_on(1, config_file, *STEPS, *once) == exit_codes.EXIT_OK
    room = int(1.6 * bytes_on_disk(checkpoint_folder(one_save) / "12"))
    flags = [config_file, *STEPS, "--run.dir", str(disk / "run")]
    more = ("--checkpoint.save-failures-allowed", "2")
    full = on_small_disk(room, disk, run, "-m", "jaxpar.train", *flags, *more)
    assert full.returncode == exit_codes.EXIT_ERROR, full.stderr
    for step in (24, 36):
        assert f"WARNING    step {step} could not be saved" in full.stderr
    assert "No space left on device" in full.stderr
    assert "error: step 48 could not be saved" in full.stderr
    assert "(failure 3 in a row)" in full.stderr
    assert "Traceback" not in full.stderr
    # It trained on meanwhile, and no line of its records is missing.
    assert sorted(losses_of(run))[:48] == list(range(1, 49))
    assert [path.name for path in checkpoint_folder(run).iterdir()] == ["12"]

    assert train_on(1, *flags[:-2]) == exit_codes.EXIT_OK  # with room, from the checkpoint before
    said = capfd.readouterr().out
    assert "restored step 12" in said and "2 attempts" in said


@pytest.mark.parametrize("file", ["config.json", slow("manifest.json")])
def test_a_disk_that_is_full_from_the_start(config_file, tmp_path, file):
    """One error, which names the file, and no traceback."""
    room, disk = 4096, tmp_path / "disk"
    if file == "manifest.json":  # the lock and the config, which are written first, fill the disk
        config = to_json(read_config([config_file, *STEPS]))
        room += -(-len(config) // 4096) * 4096
    disk.mkdir()
    command = ["-m", "jaxpar.train", config_file, *STEPS, "--run.dir", str(disk / "run")]
    full = on_small_disk(room, disk, tmp_path / "run", *command)
    assert full.returncode == exit_codes.EXIT_ERROR, full.stderr
    assert re.search(rf"error: No space left on device for .*{file}\. Free space", full.stderr)
    assert "Traceback" not in full.stderr


@pytest.mark.slow
def test_a_disk_with_no_room_for_a_checkpoint_at_all(config_file, tmp_path):
    """What Orbax could not write of its own files does not hide what the save's error says."""
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = "--train.num-steps 12 --checkpoint.every 12 --evaluation.every 0".split()
    command = ["-m", "jaxpar.train", config_file, *flags, "--run.dir", str(disk / "run")]
    full = on_small_disk(20480, disk, tmp_path / "run", *command)
    assert full.returncode == exit_codes.EXIT_ERROR, full.stderr
    assert full.stderr.rstrip().rpartition("\n")[2].startswith("error: step 12 could not be saved")
