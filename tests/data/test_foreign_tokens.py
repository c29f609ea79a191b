"""Token files that other programs wrote, read as they read them: tests/data/goldens."""

import json
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from jaxpar.commands import read
from jaxpar.config import Config, ConfigError, ParallelConfig, replace
from jaxpar.data.formats.convert import convert
from jaxpar.data.formats.inspect import inspect_tokens
from jaxpar.data.formats.others import FORMATS
from jaxpar.data.formats.token_file import Hints
from jaxpar.data.formats.token_table import TableRows
from jaxpar.data.formats.tokens import TokenDataset
from jaxpar.data.loader import Loader
from jaxpar.data.options import ConvertOptions, InspectOptions
from jaxpar.data.sources import fingerprint, open_tokens
from jaxpar.sharding.mesh import make_mesh

GOLDENS = Path(__file__).parent / "goldens"
EXPECTED = json.loads((GOLDENS / "expected.json").read_text("utf-8"))

#: Largest token + 1 of a kind that does not tell its dtype.
VOCABULARIES = {"small": 301, "large": 100_000}

#: The title of each program's format.
TITLES = {
    "megatron": "megatron",
    "datatrove": "datatrove",
    "olmo": "olmo",
    "datasets": "table",
    "mds": "mds",
    "webdataset": "webdataset",
    "llmc": "llmc",
    "nanogpt": "nanogpt",
}


def opened(name: str, **options) -> TokenDataset:
    hints = Hints(vocab_size=VOCABULARIES.get(name.rpartition("/")[2], 0))
    eos = None if name.startswith("mds") else 0
    return open_tokens(GOLDENS / name, eos_id=eos, hints=hints, **options)


@pytest.mark.parametrize("name", EXPECTED)
def test_tokens_and_documents_are_those_that_the_program_reads(name):
    found = opened(name)
    assert found.tokens[:].tolist() == EXPECTED[name]["tokens"]
    assert found.document_offsets[:-1].tolist() == EXPECTED[name]["documents"]
    assert found.document_offsets[-1] == found.num_tokens and found.knows_documents
    starts = np.array([found.num_tokens - 9, 0, 33, 50, 3])
    windows = np.array([EXPECTED[name]["tokens"][i : i + 9] for i in starts])
    np.testing.assert_array_equal(found.windows(starts, 9), windows)


@pytest.mark.parametrize("name", EXPECTED)
def test_training_reads_it_or_says_what_to_convert(name, tmp_path, monkeypatch):
    """The same batches as from one file of the same tokens."""
    monkeypatch.chdir(tmp_path)
    kind = FORMATS[TITLES[name.partition("/")[0]]]
    large = max(EXPECTED[name]["tokens"]) >= 301
    values = {"data.seq_len": 8, "train.global_batch_size": 4, "evaluation.every": 0}
    values |= {"data.eos_id": 0, "model.vocab_size": 100_096 if large else 384}
    cfg = replace(Config(), **values, **{"data.path": str(GOLDENS / name)})
    mesh = make_mesh(ParallelConfig(data=1), jax.devices()[:1])
    output = str(tmp_path / "joined")
    options = {"input": (cfg.data.path,), "output": output, "to": "jaxpar", "eos_id": 0}
    hints = {"dtype": "uint32" if large else "uint16"} if name.startswith("olmo") else {}
    convert(ConvertOptions(**options, **hints))
    same = replace(cfg, **{"data.path": output})
    if not kind.trains:
        with pytest.raises(ConfigError, match=r"data convert --input \S+ --output data/") as error:
            Loader(cfg, mesh)
        assert error.value.field == "data.path" and kind.title in str(error.value)
        cfg = same
    loader, one = Loader(cfg, mesh), Loader(same, mesh)
    for step in (0, 3):
        a, b = loader.host_rows(step, np.arange(4)), one.host_rows(step, np.arange(4))
        for field in ("tokens", "labels", "segment_ids", "positions"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


@pytest.mark.parametrize("name", EXPECTED)
def test_inspect_names_the_format(name):
    large = name.endswith("large")
    given = {"dtype": "uint32" if large else "uint16"} if name.startswith("olmo") else {}
    shown = inspect_tokens(InspectOptions(path=str(GOLDENS / name), **given))
    count = len(EXPECTED[name]["tokens"])
    kind = FORMATS[TITLES[name.partition("/")[0]]]
    assert kind.title in shown and f"{count:,} tokens" in shown
    command = (
        shown.splitlines()[-1].partition(" python -m jaxpar.")[2].replace("eos-id N", "eos-id 0")
    )
    form, *args = shlex.split(command)
    assert form == ("train" if kind.trains else "data")
    read(form, args)


def test_rows_end_documents_unless_a_token_does(tmp_path):
    """The samples of LLM Foundry and open_lm are packed: documents go on in the next one."""
    rows = opened("mds/array")
    by_eos = open_tokens(GOLDENS / "mds/array", eos_id=EXPECTED["mds/array"]["tokens"][3])
    assert rows.num_documents == 20 and by_eos.num_documents < 20
    assert by_eos.tokens[:].tolist() == rows.tokens[:].tolist()
    absent = open_tokens(GOLDENS / "mds/array", eos_id=99_999)
    assert absent.document_offsets[:].tolist() == rows.document_offsets[:].tolist()


def test_held_out_shards_are_not_trained_on():
    """fineweb's folder: the files with val in their names are the held-out split."""
    for kind in ("gpt2", "llama3"):
        train, val = (open_tokens(GOLDENS / "llmc" / kind, split, 0) for split in ("train", "val"))
        whole = np.fromfile(
            GOLDENS / f"llmc/{kind}/fineweb_val_000000.bin", val.tokens.dtype, offset=1024
        )
        assert val.tokens[:].tolist() == whole.tolist()
        assert train.tokens[:].tolist() == EXPECTED[f"llmc/{kind}"]["tokens"]


@pytest.mark.parametrize(
    "pattern",
    ["{}/fineweb_*.bin", "{}/fineweb_train_*.bin", "{0}/fineweb_train_000001.bin,{0}/*2.bin"],
)
def test_files_by_a_pattern_or_a_list(pattern):
    folder = GOLDENS / "llmc/gpt2"
    found = open_tokens(pattern.format(folder), eos_id=0)
    assert found.tokens[:].tolist() == EXPECTED["llmc/gpt2"]["tokens"]
    assert found.fingerprint == open_tokens(folder, eos_id=0).fingerprint


def test_a_list_of_megatron_prefixes():
    prefixes = ",".join(str(GOLDENS / f"megatron/{name}_text_document") for name in "ab")
    assert open_tokens(prefixes).tokens[:].tolist() == EXPECTED["megatron"]["tokens"]


def test_identity_does_not_depend_on_where_files_end(tmp_path):
    """A run that began on shards resumes on one file of the same tokens."""
    one = tmp_path / "one.bin"
    options = ConvertOptions(input=(str(GOLDENS / "llmc/gpt2"),), output=str(one), to="llmc")
    convert(options)
    of = {"data.eos_id": 0}
    shards, joined = (
        fingerprint(replace(Config(), **of, **{"data.path": str(path)}))
        for path in (GOLDENS / "llmc/gpt2", one)
    )
    assert shards == joined


def test_the_loss_mask_of_datatrove(tmp_path):
    """As TokenizedFile writes it: a byte for each token."""
    for file in (GOLDENS / "datatrove/small").iterdir():
        shutil.copy(file, tmp_path)
        if file.suffix == ".ds":
            marks = np.arange(file.stat().st_size // 2) % 3 == 0
            marks.tofile(tmp_path / f"{file.name}.loss")
    found = open_tokens(tmp_path)
    assert found.targets is not None and found.targets[:4].tolist() == [1, 0, 0, 1]
    (tmp_path / "00001_shuffled.ds.loss").unlink()
    with pytest.raises(ConfigError, match="a loss mask for some files only"):
        open_tokens(tmp_path)


@pytest.mark.parametrize("kind", ["list_", "large_list", "fixed"])
@pytest.mark.parametrize("values", ["uint16", "int64"])
def test_lists_of_every_kind_and_slices_of_them(kind, values, tmp_path):
    """As pyarrow and pandas write them; and a file that is a link to itself stops nothing."""
    of = getattr(pyarrow, values)()
    lists = pyarrow.list_(of, 3) if kind == "fixed" else getattr(pyarrow, kind)(of)
    rows = pyarrow.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]], lists)
    table = pyarrow.table({"tokens": rows})[1:]
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    with pyarrow.ipc.new_stream(tmp_path / "y.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (tmp_path / "loop").symlink_to(tmp_path)
    found = open_tokens(tmp_path)
    assert found.tokens[:].tolist() == [*range(4, 13)] * 2
    assert found.document_offsets[:].tolist() == [*range(0, 19, 3)]


def test_numpy_files_tell_their_dtype(tmp_path):
    """As of build-nanogpt: shards written by np.save, one of them held out."""
    for name, first in (("x_val_000000", 0), ("x_train_000001", 10), ("x_train_000002", 20)):
        np.save(tmp_path / f"{name}.npy", np.arange(first, first + 10, dtype=np.uint16))
    assert open_tokens(tmp_path).tokens[:].tolist() == list(range(10, 30))
    assert open_tokens(tmp_path, "val").tokens[:].tolist() == list(range(10))
    np.save(tmp_path / "rows.npy", np.arange(12, dtype=np.int64).reshape(3, 4))
    assert open_tokens(tmp_path / "rows.npy").tokens[:].tolist() == list(range(12))


def test_the_page_has_the_table_of_formats():
    page = (GOLDENS.parents[2] / "docs/data.md").read_text("utf-8")
    section = page.partition("## Existing token files")[2].partition("```sh")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(FORMATS)
    for one in FORMATS.values():
        name = one.title.removeprefix("a ").split()[0]
        assert [row for row in rows if name in row.split("|")[1]], one.title


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_row_groups_above_the_limit_are_read_in_blocks_of_rows(kind, tmp_path, monkeypatch):
    """One after another, each is decoded once; anywhere, from the start of its group."""
    draws = np.random.default_rng(0)
    rows = [draws.integers(0, 1 << 20, n).tolist() for n in draws.integers(0, 90, 500)]
    column = pyarrow.table({"input_ids": rows})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(column, path, row_group_size=180, data_page_size=512)
    else:
        with pyarrow.ipc.new_file(path, column.schema) as writer:
            writer.write_table(column, max_chunksize=180)
    monkeypatch.setattr("jaxpar.data.formats.token_table.BLOCK_TOKENS", 700)
    decoded = []
    of_group = TableRows._of_group

    def counted(self, first):
        decoded.append(first)
        return of_group(self, first)

    monkeypatch.setattr(TableRows, "_of_group", counted)
    found = open_tokens(path)
    assert found.num_documents == sum(map(bool, rows))
    expected = np.concatenate([np.array(row, np.int64) for row in rows])
    most, blocks = max(map(len, rows)), TableRows(path)
    assert blocks.num_blocks >= len(expected) / 700
    passes = len(decoded)
    assert passes == 6  # for the lengths of rows, and for the largest token
    sizes = [sum(map(len, blocks.read(block))) for block in range(blocks.num_blocks)]
    assert max(sizes) <= 2 * 700 + most and len(decoded) == passes + 3
    np.testing.assert_array_equal(found.tokens[:], expected)
    assert len(decoded) == passes + 6
    for start in draws.integers(0, len(expected) - 50, 40):
        window = found.windows(np.array([start, start // 2]), 50)
        np.testing.assert_array_equal(window[0], expected[start : start + 50])
        np.testing.assert_array_equal(window[1], expected[start // 2 :][:50])
