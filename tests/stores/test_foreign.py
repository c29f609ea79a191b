"""Objects that jaxpar did not write, as folder markers: they stop no upload and no reader."""

import json

import boto3
import pytest

from jaxpar.checkpoint import inspection
from jaxpar.config import ConfigError
from jaxpar.data.stored import whole_address
from jaxpar.runtime import exit_codes
from jaxpar.stores import steps
from jaxpar.stores.folders import new_folder_at
from jaxpar.stores.objects import OddName
from jaxpar.stores.reading import for_reading, runs_at
from tests.slow import slow
from tests.stores.folders import write_run, write_step
from tests.stores.test_mirror import mirrored

MARKERS = ("", "checkpoints/", "complete/", "shards/", "checkpoints/10/", "checkpoints/10/state/")
MARKERS += ("metrics.jsonl.parts/", "profiles/", "hf/tokenizer/", "checkpoints/x", "complete/1e3")
MARKERS += ("complete/\u0663", "complete/" + "9" * 40, "checkpoints/007/x", "shards/a", "a%2F b")


def put(s3, address, *keys: str) -> None:
    """Write empty objects, whose names may end in "/"."""
    client = boto3.client("s3", endpoint_url=s3.url, region_name="us-east-1")
    for key in keys:
        client.put_object(Bucket=address.bucket, Key=f"{address.prefix}/{key}", Body=b"")


def complete(address, folder, *numbers: int) -> None:
    """Let a mirror upload a run. Every step must be complete in the end."""
    write_run(folder, list(numbers))
    with mirrored(address, folder) as mirror:
        pass
    assert mirror.drain(), mirror.waiting()


@pytest.mark.parametrize(
    "keys", [pytest.param(MARKERS, id="all at once"), *(slow((key,), id=key) for key in MARKERS)]
)
def test_a_marker_stops_no_upload_and_no_reader(s3, address, store, tmp_path, keys, capsys):
    put(s3, address, *keys)
    complete(address, tmp_path / "run", 10, 20)
    assert steps.complete_steps(store) == [10, 20]
    put(s3, address, *keys)
    write_step(tmp_path / "run", 30)
    complete(address, tmp_path / "run", 10, 20, 30)
    folder = for_reading("RUN", str(address), print)
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()
    assert [row.step for row in inspection.rows_in_store(str(address))] == [10, 20, 30]
    above = address._replace(prefix=address.prefix.rpartition("/")[0])
    assert runs_at("FOLDER", str(above), 3) == [str(address)]
    steps.delete_step(store, 10)
    assert steps.complete_steps(store) == [20, 30]
    assert "WARNING" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "key", ["checkpoints//x", "x//y", "checkpoints/./y", "checkpoints/10/../z"]
)
def test_a_name_that_cannot_be_listed_is_named_and_stops_no_upload(
    s3, address, store, tmp_path, key, capsys
):
    put(s3, address, key)
    complete(address, tmp_path / "run", 10)
    assert steps.complete_steps(store) == [10]
    if key == "checkpoints//x":
        assert f"has an object '{address.prefix}/checkpoints//" in capsys.readouterr().err
    with pytest.raises(OddName, match=r"has an object '.*', whose name no file can have.*Fix: del"):
        store.names()
    before = len(s3.requests)
    with pytest.raises(ConfigError):
        store.names()
    assert len(s3.requests) == before + 1  # it is not asked again


def test_a_dataset_and_a_model_can_be_written_beside_markers(s3, address, store):
    put(s3, address, "", "train/", "a/b/")
    with new_folder_at("DIR", str(address), "config.json") as folder:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    put(s3, address._replace(prefix="data/x"), "", "train/")
    with whole_address(f"s3://{address.bucket}/data/x", overwrite=False) as folder:
        (folder / "meta.json").write_text("{}")
    assert store.read("config.json")[0] == b"{}"


def test_objects_that_cannot_be_files_here_are_left_out(address, store, tmp_path, capsys):
    complete(address, tmp_path / "run", 10)
    store.write("config.json/x", b"")
    store.write("y" * 300, b"")
    folder = for_reading("RUN", str(address), print)
    assert json.loads((folder / "config.json").read_text()) == {"run": {}}
    said = capsys.readouterr().err
    assert "config.json/x is left out: " in said and f"{'y' * 300} is left out: " in said


def test_files_whose_names_cannot_be_objects_keep_nothing_else_waiting(address, store, tmp_path):
    write_run(tmp_path / "run", [10])
    (tmp_path / "run" / "a\nb").write_text("x")
    (tmp_path / "run" / "a\udcff").write_text("x")
    complete(address, tmp_path / "run", 10)
    assert steps.complete_steps(store) == [10] and store.read("config.json")[0]
    assert exit_codes.EXIT_NOT_STORED == 73
