"""Commands that look at runs in a store: the table of runs, the list and check of checkpoints."""

import json
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.stores import steps
from jaxpar.stores.reading import runs_at
from tests.convert.test_export import save_run
from tests.stores.folders import write_run
from tests.stores.test_mirror import mirrored

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")


@pytest.fixture
def run(address, tmp_path, devices) -> str:
    """The address of a run with checkpoints of steps 3 and 5."""
    cfg, _ = save_run(tmp_path, devices, steps=(3, 5))
    with mirrored(address, Path(cfg.run.dir)):
        pass
    return str(address)


def test_runs_are_listed_with_their_addresses(address, tmp_path, capsys, s3):
    for name, loss in (("one", 3.5), ("two/deep", 2.5)):
        folder = tmp_path / name
        write_run(folder, [1])
        config = {"run": {"dir": str(folder)}, "train": {"seed": int(10 * loss), "num_steps": 7}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
        with mirrored(address._replace(prefix=f"many/{name}"), folder):
            pass
    at = str(address._replace(prefix="many"))
    assert runs_at("FOLDER", at, 3) == [f"{at}/one", f"{at}/two/deep"]
    assert runs_at("FOLDER", at, 1) == [f"{at}/one"] == runs_at("FOLDER", f"{at}/one", 0)
    s3.requests.clear()
    capsys.readouterr()
    call("report", ["--list", at])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1::2]] == [f"{at}/two/deep", f"{at}/one"]
    assert "2.5000" in shown[1] and "train.seed 25" in shown[2]
    assert not [path for _, path in s3.requests if "/checkpoints/" in path]
    with pytest.raises(ConfigError, match="has no run in it"):
        call("report", ["--list", f"{at}-none"])


def test_checkpoints_are_listed_without_their_arrays(run, store, capsys, s3):
    s3.requests.clear()
    assert call("checkpoint", ["ls", run]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["3", "5"] and "mesh" in head
    assert all("1 device" in row and "arrays with fingerprints" in row for row in rows)
    assert not [path for method, path in s3.requests if "state/d" in path]
    (data,) = [one.name for one in store.names("checkpoints/3/state/d/")][:1]
    store.write(data, b"short")
    store.delete(["complete/5"])
    assert call("checkpoint", ["ls", run]) == 0
    damaged, incomplete = capsys.readouterr().out.splitlines()[1:]
    assert "DAMAGED: state/d/" in damaged and "has 5 bytes, not" in damaged
    assert "incomplete: its upload goes on, or was killed" in incomplete


def test_every_byte_is_verified(run, store, capsys, tmp_path):
    assert call("checkpoint", ["verify", run]) == 0
    assert capsys.readouterr().out.count(": intact") == 2
    data = max(store.names("checkpoints/5/"), key=lambda one: one.size).name
    content = store.read(data)[0]
    store.write(data, content[:-1] + bytes([content[-1] ^ 1]))
    assert call("checkpoint", ["verify", run]) == 1
    told = capsys.readouterr().out
    assert "step 3: intact" in told and "step 5: DAMAGED" in told
    assert f"step 5: {data} has different content" in told
    assert call("checkpoint", ["verify", run, "--step", "3"]) == 0
    with pytest.raises(ConfigError, match=r"--step = 4: is no checkpoint of .*use one of 3, 5"):
        call("checkpoint", ["verify", run, "--step", "4"])
    steps.delete_step(store, 3)
    steps.delete_step(store, 5)
    for command in ("ls", "verify"):
        with pytest.raises(ConfigError, match="contains no checkpoint"):
            call("checkpoint", [command, run])
    assert not list((tmp_path / "cache" / "jaxpar").glob("verify/*"))
