"""Datasets in a store: the same batches as from the disk, through a cache that is bounded."""

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, Source, replace
from jaxpar.config.rules.paths import Address
from jaxpar.config.validate import check
from jaxpar.data import stored as stored_folder
from jaxpar.data.formats.meta import META_FILE, read_meta
from jaxpar.data.loader import Loader
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.stored_parts import StoredParts
from jaxpar.data.prepare.text import TextCorpus, prepare
from jaxpar.data.sources import fingerprint, open_sources, tokenizer_folder
from jaxpar.data.stored import whole_address
from jaxpar.runtime.exit_codes import RunError
from jaxpar.sharding.axes import AXES
from jaxpar.stores import cache, folders
from jaxpar.stores.cache import ObjectDamaged
from jaxpar.stores.folders import listed_files
from tests.data.commands import main
from tests.stores.server import objects_at

LENGTH = 32


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch):
    """Parts of 512 bytes in blocks of 64; no dataset stays open."""
    monkeypatch.setattr(cache, "PART_BYTES", 512)
    monkeypatch.setattr(cache, "BLOCK_BYTES", 64)
    yield
    stored_folder.close_all()


@pytest.fixture
def data(address) -> Address:
    return address._replace(prefix="data/text")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A file of documents."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [{"text": f"document {i}: " + "the quick fox " * (i % 9)} for i in range(90)]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


@pytest.fixture(scope="module")
def here(text) -> Path:
    """A dataset on the disk. Tests must not write to it."""
    prepare(PrepareOptions(input=(str(text),), output=str(text.with_name("made")), holdout=0.2))
    return text.with_name("made")


@pytest.fixture
def made(data, here, s3) -> Config:
    """A config with the same dataset in the store."""
    with whole_address(str(data), overwrite=False) as folder:
        shutil.copytree(here, folder, dirs_exist_ok=True)
    return config(data)


def config(place, **more) -> Config:
    values = {"data.path": str(place), "data.seq_len": LENGTH, "train.global_batch_size": 16}
    return replace(Config(), **values, **more)


def loader(cfg: Config, split: str = "train") -> Loader:
    return Loader(cfg, jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * 6), AXES), split)


def assert_same_batches(one: Loader, other: Loader, steps=range(6)) -> None:
    for step in steps:
        chex.assert_trees_all_equal(one.batch(step), other.batch(step))


def without_filling(monkeypatch) -> None:
    monkeypatch.setattr(cache.CachedObject, "fetch_all", lambda self, first=0: None)


def files(cfg: Config):
    """The parts in the cache."""
    folder = stored_folder.cache_folder("data") / "parts"
    return sorted(path for path in folder.glob("*/*") if not path.name.startswith("."))


def test_batches_and_fingerprint_are_those_of_the_folder(made, tmp_path, data, here):
    check(made)
    assert fingerprint(made) == fingerprint(config(here))
    for split in ("train", "val"):
        assert_same_batches(loader(made, split), loader(config(here), split), range(4))
    mixed = {
        "data.mixture": (Source(str(data), 1.0), Source(str(here), 2.0)),
        "data.held_out": str(data),
    }
    both = {"data.mixture": (Source(str(here), 1), Source(f"{here.parent}/./made", 2))}
    mixed, both = replace(made, **mixed), replace(config(here), **both)
    check(mixed)
    assert_same_batches(loader(mixed), loader(both), range(4))
    assert_same_batches(loader(mixed, "val"), loader(config(here), "val"), range(4))
    assert loader(made).epochs(10).keys() == {str(data)}
    assert (tmp_path / tokenizer_folder(made) / META_FILE).is_file()


def test_a_part_of_a_dataset_is_an_object(text, here, data, tmp_path):
    """Batches are those of one file, also those that cross the end of an object."""
    lines = text.read_text().splitlines(keepends=True)
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text("".join(lines[30 * number : 30 * number + 30]))
    inputs = tuple(str(tmp_path / f"{number}.jsonl") for number in range(3))
    prepare(PrepareOptions(input=inputs, output=str(data), holdout=0.2, parts=3))
    objects = {found.name for found in objects_at(data).names()}
    assert {f"part-{number:05}/train.bin" for number in range(3)} < objects
    assert fingerprint(config(data)) == fingerprint(config(here))
    for split in ("train", "val"):
        assert_same_batches(loader(config(data), split), loader(config(here), split), range(9))
    assert not list((tmp_path / tokenizer_folder(config(data))).rglob("counts.npy"))


def test_parts_are_fetched_once_also_by_other_processes(made, monkeypatch, s3):
    without_filling(monkeypatch)
    first = loader(made)
    first.batch(0)
    s3.requests.clear()
    first.batch(0)
    assert not s3.requests
    stored_folder.close_all()  # as a new process
    loader(made).batch(0)
    assert not [path for _, path in s3.requests if path.endswith("train.bin")]


@pytest.mark.waits
def test_what_fits_is_fetched_in_the_background(made, s3):
    source = open_sources(made, "train")[0].dataset
    stored = source.tokens.arrays[0].stored
    done = threading.Event()
    for _ in range(500):
        if all(stored._cache.has(stored._key, n) for n in range(stored.num_parts)):
            done.set()
            break
        done.wait(0.01)
    assert done.is_set() and stored.num_parts > 10
    s3.failing(10_000, 503, "GET")
    assert len(source.tokens[:]) == source.num_tokens


def test_the_cache_stays_below_its_size(made, monkeypatch, here):
    without_filling(monkeypatch)
    some = loader(made)
    stored = some.sources[0].dataset.tokens.arrays[0].stored
    stored._cache.limit = limit = 16 * 528
    for step in range(12):
        some.batch(step)
        assert sum(path.stat().st_size for path in files(made)) <= limit
    stored._cache.limit = 1 << 30
    assert_same_batches(some, loader(config(here)))


@pytest.fixture
def fetched(monkeypatch) -> Counter[str]:
    """The bytes that were asked for, by object."""
    sizes, read = Counter[str](), stored_folder.Objects.read_range

    def counted(self, name, first, last, *more):
        sizes[name] += last - first
        return read(self, name, first, last, *more)

    monkeypatch.setattr(stored_folder.Objects, "read_range", counted)
    return sizes


def test_of_data_above_the_cache_what_is_used_is_read(made, data, here, fetched):
    """Whole blocks, at random places; the small held-out split is kept."""
    size = (here / "train.bin").stat().st_size
    made = replace(made, **{"data.cache_gib": size * 1.2 / 2**30})
    train, val = loader(made), loader(made, "val")
    assert_same_batches(train, loader(config(here)), range(4))
    used = 4 * 16 * (LENGTH + 1) * 2
    # Of 66 bytes at a random multiple of 64: two blocks.
    assert used < fetched["train.bin"] <= 2 * used
    assert train.sources[0].dataset.tokens[:].tolist() == tokens_of(here)
    for _ in range(3):
        val.sources[0].dataset.tokens[:]
    assert fetched["val.bin"] <= (here / "val.bin").stat().st_size
    objects_at(data).write("train.bin", bytes(size))  # with another ETag
    with pytest.raises(ObjectDamaged, match="was deleted or replaced while it was read"):
        train.batch(9)


def tokens_of(folder: Path) -> list[int]:
    return np.fromfile(folder / "train.bin", "<u2").tolist()


def test_the_parts_that_were_not_read_for_longest_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "USE_SECONDS", 0.0)
    parts = cache.PartCache(tmp_path / "parts", 8 * 116)
    for number in range(6):
        parts.read("key", number, 100, slice(0, 10), lambda: b"x" * 100)
    parts.read("key", 0, 100, slice(0, 10), lambda: b"")  # used again
    parts.read("key", 6, 100, slice(0, 10), lambda: b"y" * 100)
    parts.read("key", 7, 100, slice(0, 10), lambda: b"y" * 100)
    assert [number for number in range(8) if parts.has("key", number)] == [0, 3, 4, 5, 6, 7]
    parts.limit = 4 * 116  # another run asks for less
    parts.remove_oldest()
    assert [number for number in range(8) if parts.has("key", number)] == [0, 6, 7]


@pytest.mark.parametrize("how", ["altered", "truncated"])
def test_a_damaged_part_of_the_cache_is_fetched_again(made, capsys, how, monkeypatch, here):
    without_filling(monkeypatch)
    loader(made).batch(0)
    for path in files(made):
        content = path.read_bytes()
        path.write_bytes(content[:-40] if how == "truncated" else b"\xff" + content[1:])
    if how == "altered":
        stored_folder.close_all()  # what this process has read it trusts
    assert_same_batches(loader(made), loader(config(here)))
    assert "is damaged, and is fetched again" in capsys.readouterr().err


def test_a_damaged_object_is_named(made, data, monkeypatch):
    without_filling(monkeypatch)
    store = objects_at(data)
    content = store.read("train.bin")[0]
    store.write("train.bin", content[:1000] + b"\0" + content[1001:])
    dataset = open_sources(made, "train")[0].dataset
    with pytest.raises(ObjectDamaged, match=r"bytes 512 to 1,024 of s3://.*/train.bin are"):
        dataset.tokens[:]


def test_a_dataset_that_is_replaced_meanwhile_ends_the_run(made, data, monkeypatch):
    without_filling(monkeypatch)
    dataset = open_sources(made, "train")[0].dataset
    objects_at(data).write("train.bin", b"\0" * dataset.tokens.nbytes)
    with pytest.raises(ObjectDamaged, match=r"train.bin was deleted or replaced while it was read"):
        dataset.tokens[:]


def test_a_folder_copied_by_other_means_is_a_dataset(made, data, here):
    other = data._replace(prefix="copied")
    for path in here.iterdir():
        objects_at(other).upload(path.name, path)
    assert_same_batches(loader(config(other)), loader(config(here)))


def test_passing_errors_are_retried(made, s3, here):
    some = loader(made)
    s3.failing(3, 503, "GET", "train.bin")
    assert_same_batches(some, loader(config(here)))


def test_a_cache_without_space_is_no_error(made, monkeypatch, capsys, here):
    some = loader(made)
    stored = some.sources[0].dataset.tokens.arrays[0].stored
    stored._cache.folder = Path("/proc/1/none")  # nothing can be made there
    assert_same_batches(some, loader(config(here)), range(2))
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_small_files_are_replaced_when_they_change_or_are_damaged(made, data, here):
    (copy,) = {one.dataset.path for one in open_sources(made, "train")}
    stored_folder.close_all()
    path = copy / "train.documents.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\1")
    assert_same_batches(loader(made), loader(config(here)))
    assert path.read_bytes() == content
    objects_at(data).write("train.documents.npy", content[:-1] + b"\1")
    stored_folder.close_all()
    with pytest.raises(RunError, match=r"is damaged: train.documents.npy has different content"):
        loader(made)


def test_a_dataset_is_complete_or_absent(made, data, monkeypatch, tmp_path, capsys, text):
    asked = ["prepare", "--input", str(text), "--output", str(data)]
    assert main(asked) == 2 and "already has a dataset" in capsys.readouterr().err
    upload = folders.Objects.upload

    def killed(self, name, file, beside=1):
        if name == "val.bin":
            raise KeyboardInterrupt
        return upload(self, name, file, beside)

    monkeypatch.setattr(folders.Objects, "upload", killed)
    assert main([*asked, "--overwrite"]) == 130
    with pytest.raises(ConfigError, match=r"data.path = 's3://.*has no dataset \(no meta.json\)"):
        open_sources(made, "train")
    monkeypatch.setattr(folders.Objects, "upload", upload)
    assert main(asked) == 0
    assert str(data) in capsys.readouterr().out
    assert open_sources(made, "train")
    assert not list((tmp_path / "cache" / "jaxpar" / "preparing").iterdir())


def test_parts_leave_this_host_when_they_are_complete(data, text, s3, monkeypatch, tmp_path):
    """Their tokens are in the store before the dataset is, and only one part's are here."""
    lines, upload, most = (
        text.read_text().splitlines(keepends=True),
        stored_folder.Objects.upload,
        0,
    )

    def counted(self, name, file, beside=1):
        nonlocal most
        most = max(most, len([*(tmp_path / "cache/jaxpar/preparing").rglob("train.bin")]))
        return upload(self, name, file, beside)

    monkeypatch.setattr(stored_folder.Objects, "upload", counted)
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text("".join(lines[30 * number :][:30]))
    inputs = tuple(str(tmp_path / f"{number}.jsonl") for number in range(3))
    made = {"input": inputs, "holdout": 0.2, "parts": 3, "workers": 1}
    prepare(PrepareOptions(output=str(tmp_path / "here"), **made))
    prepare(PrepareOptions(output=str(data), **made))
    assert most == 1
    assert_same_batches(loader(config(data)), loader(config(tmp_path / "here")), range(3))
    listed = listed_files(objects_at(data))
    assert {f"part-{n:05}/train.bin" for n in range(3)} <= listed.keys()
    found = {one.name for one in objects_at(data).names()}
    assert listed.keys() | {META_FILE, folders.FILES} == found


@pytest.fixture
def task(data, text, tmp_path, monkeypatch):
    """Writes a part of seven, as a task on a host of its own; None: those that are missing."""
    (tmp_path / "in").mkdir()
    lines = text.read_text().splitlines(keepends=True)
    for number in range(9):
        (tmp_path / f"in/{number}.jsonl").write_text("".join(lines[number::9]))

    def run(part: int | None, output=data, **more):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{part}"))
        asked = {"input": (str(tmp_path / "in"),), "holdout": 0.2, "parts": 7, "workers": 1} | more
        return prepare(PrepareOptions(output=str(output), part=part, **asked))

    return run


def test_tasks_that_share_only_a_store(task, data, tmp_path, s3):
    """In any order; one is killed as it sends, one runs again. The last one makes the dataset."""
    task(None, tmp_path / "here")
    for part in (6, 2, 0):
        assert task(part) is None
    s3.fault = lambda method, path: 403 if "part-00005/sent.json" in path else None
    with pytest.raises(ConfigError):
        task(5)
    s3.fault = lambda method, path: None
    with pytest.raises(ConfigError, match="has no dataset"):
        open_sources(config(data), "train")
    for part in (5, 2, 3, 1):
        assert task(part) is None
    with pytest.raises(ConfigError, match=r"has parts in s3://.* that differ in --tokenizer"):
        task(4, tokenizer="bpe:300")
    made = task(4)
    assert made == read_meta(tmp_path / "here")
    assert task(4) == made  # again, after the dataset is complete
    for split in ("train", "val"):
        there, here = (loader(config(path), split) for path in (data, tmp_path / "here"))
        assert_same_batches(there, here, range(3))
    objects = objects_at(data)
    names = {one.name for one in objects.names()}
    assert names == {*listed_files(objects), META_FILE, folders.FILES}
    assert not list(tmp_path.glob("cache-*/jaxpar/preparing/*"))
    with pytest.raises(ConfigError, match="already has a dataset"):
        task(4, tokenizer="bpe:300")


def test_the_plan_is_that_of_the_first_task(task, tmp_path, monkeypatch):
    """Two tasks begin at the same time, and train a tokenizer each; two see that all is there."""
    task(None, tmp_path / "here", tokenizer="bpe:300", parts=2)
    assert task(0, tokenizer="bpe:300", parts=2) is None
    copy, delayed = StoredParts.copy, []

    def late(self, name, folder):
        delayed.append(name)
        return len(delayed) > 2 and copy(self, name, folder)  # as it looks, there is no plan

    monkeypatch.setattr(StoredParts, "copy", late)
    found, fetch = [], StoredParts.fetch

    def both(self, work, folders):
        fetch(self, work, folders)
        monkeypatch.setattr(StoredParts, "fetch", fetch)
        monkeypatch.setattr(StoredParts, "copy", copy)
        found.append(task(0, tokenizer="bpe:300", parts=2))

    monkeypatch.setattr(StoredParts, "fetch", both)
    found.append(task(1, tokenizer="bpe:300", parts=2))
    assert found == [read_meta(tmp_path / "here")] * 2 and "plan.json" in delayed


def test_a_command_that_was_stopped_goes_on_in_a_store(task, data, tmp_path, monkeypatch):
    task(None, tmp_path / "here")
    written, write = [], TextCorpus.write

    def stopped(self, one, folder, report):
        written.append(one.number)
        if len(written) == 4:
            raise KeyboardInterrupt
        return write(self, one, folder, report)

    monkeypatch.setattr(TextCorpus, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        task(None)
    assert task(None) == read_meta(tmp_path / "here")
    assert written == [0, 1, 2, 3, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="already has a dataset"):
        task(None)
    other = task(None, tokenizer="bpe:300", parts=2, overwrite=True)
    assert len(other.splits["train"].parts) == 2
    assert fingerprint(config(data)) == other.fingerprint
    names = {one.name for one in objects_at(data).names()}
    assert names == {*listed_files(objects_at(data)), META_FILE, folders.FILES}


@pytest.mark.parametrize("most", [700, 1 << 30])
def test_convert_sends_parts_when_they_are_complete(data, here, s3, monkeypatch, tmp_path, most):
    """It keeps tokens, documents and bytes of text, and one part here at a time."""
    monkeypatch.setattr("jaxpar.data.formats.convert.PART_TOKENS", most)
    upload, held = stored_folder.Objects.upload, []

    def counted(self, name, file, beside=1):
        found = (tmp_path / "cache/jaxpar/preparing").rglob("*.bin")
        held.append(sum(path.stat().st_size for path in found))
        return upload(self, name, file, beside)

    monkeypatch.setattr(stored_folder.Objects, "upload", counted)
    both = ["--input", str(here), str(here), "--held-out", str(here), "--tokenizer", "bytes"]
    for output in (data, tmp_path / "copy"):
        assert main(["convert", *both, "--to", "jaxpar", "--output", str(output)]) == 0
    assert fingerprint(config(data)) == fingerprint(config(tmp_path / "copy"))
    for split in ("train", "val"):
        assert_same_batches(loader(config(data), split), loader(config(tmp_path / "copy"), split))
    places = tokenizer_folder(config(data)), tmp_path / "copy"
    (train, val), copied = (list(read_meta(place).splits.values()) for place in places)
    assert [train.num_bytes, val.num_bytes] == [one.num_bytes for one in copied]
    assert read_meta(places[0]).unigram_entropy == read_meta(places[1]).unigram_entropy
    assert most < 1000 or len(train.parts) == 1
    assert max(held) == 2 * max(part.num_tokens for part in train.parts)
    for part in train.parts[:-1]:
        assert most <= part.num_tokens <= most + 140


def test_inspect_takes_an_address(made, data, here, capsys):
    assert main(["inspect", str(data)]) == 0
    stored = capsys.readouterr().out.split("\n")
    assert main(["inspect", str(here)]) == 0
    local = capsys.readouterr().out.split("\n")
    assert stored[0].startswith(f"{data}: a dataset of ")
    assert stored[1:] == local[1:]
    objects_at(data).write("train.bin", b"\0" * (here / "train.bin").stat().st_size)
    stored_folder.close_all()
    with pytest.raises(ObjectDamaged):
        main(["inspect", str(data)])
    assert main(["inspect", f"{data}-none"]) == 2
    assert "has no dataset (no meta.json)" in capsys.readouterr().err


def test_what_cannot_be_in_a_store_is_refused(made, data, capsys, text):
    asked = ["prepare", "--input", str(text), "--output"]
    assert main([*asked, f"{data}2", "--stream"]) == 2
    assert "leave out --stream" in capsys.readouterr().err
    objects_at(data._replace(prefix="data/other")).write("photo.png", b"")
    assert main([*asked, str(data._replace(prefix="data/other"))]) == 2
    assert "contains 'photo.png'" in capsys.readouterr().err
    assert main(["prepare", "--input", f"{data}/text.jsonl", "--output", "out"]) == 2
    assert "has no objects" in capsys.readouterr().err
    for field in ("data.path", "data.held_out"):
        with pytest.raises(ConfigError, match=f"{field} = .*must be s3://BUCKET/PREFIX"):
            check(replace(made, **{field: "s3://"}))
    with pytest.raises(ConfigError, match=r"data.cache_gib = 0.5: must be at least 1"):
        check(replace(made, **{"data.cache_gib": 0.5}))
    with pytest.raises(ConfigError, match=r"data.cache_dir = .*cannot be written"):
        open_sources(replace(made, **{"data.cache_dir": f"{text}"}), "train")


@pytest.mark.waits
@pytest.mark.slow
def test_two_processes_share_the_cache(made, data, monkeypatch, s3, here):
    """Both read every token at the same time: each part is asked for once."""
    code = f"""
import numpy as np
from jaxpar.config import Config, replace
from jaxpar.data.sources import open_sources
from jaxpar.stores import cache
cache.PART_BYTES, cache.BLOCK_BYTES = 512, 64
cache.CachedObject.fetch_all = lambda self, first=0: None
(source,) = open_sources(replace(Config(), **{{"data.path": {str(data)!r}}}), "train")
print(source.dataset.tokens[:].astype(np.int64).sum())
"""
    s3.requests.clear()
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    sums = {int(one.communicate(timeout=600)[0]) for one in both}
    (whole,) = open_sources(config(here), "train")
    assert sums == {int(whole.dataset.tokens[:].astype(np.int64).sum())}
    parts = -(-whole.dataset.tokens.nbytes // 512)
    asked = [method for method, path in s3.requests if path.endswith("train.bin")]
    assert asked.count("GET") == parts
