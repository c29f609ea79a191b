"""The measurement of stores runs, and leaves nothing behind."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure" / "stores.py"


def measure(address, gigabytes: float, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("measure_stores", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main([str(address), f"--gb={gigabytes}", "--files=3", f"--folder={folder}"])


@pytest.mark.parametrize("gigabytes", [0.01, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_checkpoint_is_sent_and_received(address, store, tmp_path, capsys, gigabytes):
    measure(address, gigabytes, tmp_path)
    upload, download = capsys.readouterr().out.splitlines()
    for line, what in ((upload, "upload"), (download, "download")):
        assert line.startswith(what) and f"{gigabytes:.3f} GB in" in line
    assert not store.names() and not list(tmp_path.iterdir())
