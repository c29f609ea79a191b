"""Readers: every format gives the same documents, and broken input names its place."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpar.config import ConfigError
from jaxpar.data.formats import compressed, readers
from jaxpar.data.formats.readers import ReadOptions
from jaxpar.data.prepare.documents import find_sources, read_pieces


def documents(*inputs: Path | str, **options) -> list[str]:
    """Every document, whole."""
    found, parts = [], []
    for piece in read_pieces(find_sources([str(i) for i in inputs]), ReadOptions(**options)):
        parts.append(piece.text)
        if piece.last:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found


def jsonl(texts: list[str], field: str = "text") -> bytes:
    """JSON Lines, with a blank line, which is allowed."""
    return b"\n".join([b"", *(json.dumps({field: t}).encode() for t in texts)])


def write_parquet(path: Path, texts: list, column: str = "text") -> None:
    """Several row groups and a second column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(texts)), column: texts}), path, row_group_size=7)


def zstd(data: bytes) -> bytes:
    """A Zstandard frame."""
    output = pa.BufferOutputStream()
    with pa.CompressedOutputStream(output, "zstd") as stream:
        stream.write(data)
    return output.getvalue().to_pybytes()


def write_arrow(path: Path, texts: list, column: str = "text", *, stream: bool = False) -> None:
    """Several batches and a second column."""
    table = pa.table({"id": range(len(texts)), column: texts})
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def save_to_disk(folder: Path, *shards: list[str]) -> None:
    """What `datasets.save_to_disk` leaves, as far as it is read, and a cache of the library's."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        write_arrow(folder / name, texts, stream=True)
    write_arrow(folder / "cache-0123.arrow", ["cached"], stream=True)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


FORMATS = [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".stream.arrow"]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("field", ["text", "body"])
def test_formats_hold_the_same(suffix, field, texts, tmp_path):
    """JSON Lines, compressed or not, Parquet, and both kinds of Arrow file."""
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        write_parquet(path, texts, field)
    elif suffix.endswith("arrow"):
        write_arrow(path, texts, field, stream="stream" in suffix)
    else:
        compress = {"gz": gzip.compress, "zst": zstd}.get(suffix.rpartition(".")[2], bytes)
        path.write_bytes(compress(jsonl(texts, field)))
    assert documents(path, text_field=field) == texts


def test_text_files_and_folders(texts, tmp_path):
    """A .txt file is a document; folders are searched in sorted order; the rest is left alone."""
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "a.txt").write_bytes(texts[1].encode())
    (tmp_path / "b" / "deep" / "x.TXT").write_bytes(texts[2].encode())
    (tmp_path / "c.jsonl").write_bytes(jsonl(texts[3:5]))
    (tmp_path / "README.md").write_text("not a document")
    assert documents(tmp_path) == texts[1:5]
    assert documents(tmp_path / "c.jsonl", tmp_path / "a.txt") == [*texts[3:5], texts[1]]


def test_hugging_face_folders(texts, tmp_path):
    """The shards that state.json names, in its order, wherever the folder lies; no caches."""
    save_to_disk(tmp_path / "saved" / "train", texts[10:], texts[:10])
    assert documents(tmp_path / "saved" / "train") == texts[10:] + texts[:10]
    assert documents(tmp_path) == texts[10:] + texts[:10]
    write_parquet(tmp_path / "hub" / "train-00001-of-00002.parquet", texts[3:])
    write_parquet(tmp_path / "hub" / "train-00000-of-00002.parquet", texts[:3])
    assert documents(tmp_path / "hub") == texts


def test_hugging_face_folders_that_cannot_be_read(tmp_path):
    """Several splits, a missing shard, a state.json of something else."""
    for split in ("train", "test"):
        save_to_disk(tmp_path / "all" / split, ["a"])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match="is a dataset with several splits: test, train") as error:
        documents(tmp_path / "all")
    assert str(tmp_path / "all" / "train") in error.value.fix
    train = tmp_path / "all" / "train"
    (train / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ConfigError, match=r"is missing, but .*state\.json lists it"):
        documents(train)
    for text in ("{", "[]", '{"_data_files": [1]}'):
        (train / "state.json").write_text(text)
        with pytest.raises(ConfigError, match=r"is not what `datasets\.save_to_disk` writes"):
            documents(train)


def test_a_link_to_the_folder_above_is_not_followed(texts, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert documents(tmp_path) == texts


def test_links_to_other_places_are_followed(texts, tmp_path):
    inside, other = tmp_path / "inside", tmp_path / "other"
    inside.mkdir()
    other.mkdir()
    (other / "a.jsonl").write_bytes(jsonl(texts))
    (inside / "linked").symlink_to(other, target_is_directory=True)
    assert documents(inside) == texts
    (inside / "b.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"b\.jsonl.* is a link to a missing file"):
        documents(inside)


@pytest.mark.parametrize("separator", ["\n\n", "<|endoftext|>"])
@pytest.mark.parametrize("piece_chars", [1, 7, 1 << 20])
def test_separator(separator, piece_chars, tmp_path, monkeypatch):
    """A separator is found wherever the reads of the file fall."""
    monkeypatch.setattr(readers, "PIECE_CHARS", piece_chars)
    texts = ["first\nline", "second", "<|end", "日本", ""]
    path = tmp_path / "all.txt"
    path.write_bytes(separator.join(texts).encode())
    assert documents(path, separator=separator) == texts


@pytest.mark.parametrize("piece_chars", [1, 2, 3, 7, 1 << 20])
def test_newlines_of_a_separator_match_those_of_windows(piece_chars, tmp_path, monkeypatch):
    """Both kinds, mixed too; those inside documents stay as they are."""
    monkeypatch.setattr(readers, "PIECE_CHARS", piece_chars)
    path = tmp_path / "all.txt"
    path.write_bytes(b"a\r\nb\r\n\r\nc\n\nd\r\n\ne\n\r\nf\r\n.+\r\ng\r\r\nh\r\n")
    rest = "f\r\n.+\r\ng\r\r\nh\r\n"
    assert documents(path, separator="\n\n") == ["a\r\nb", "c", "d", "e", rest]
    assert documents(path, separator="\n.+\n")[1:] == ["g\r\r\nh\r\n"]
    assert documents(path, separator="\r\n\r\n") == ["a\r\nb", "c\n\nd\r\n\ne\n\r\n" + rest]


def test_separator_that_never_comes(tmp_path, monkeypatch):
    """A separator that the file lacks must not fill the memory."""
    monkeypatch.setattr(readers, "PIECE_CHARS", 10)
    monkeypatch.setattr(readers, "MAX_DOCUMENT_CHARS", 100)
    path = tmp_path / "all.txt"
    path.write_text("x" * 1000)
    with pytest.raises(ConfigError, match=r"no '\|' within 100 characters"):
        documents(path, separator="|")


def bomb(write, line_bytes: int) -> None:
    """Write a line of zeros, after a short one."""
    write(b'{"text": "a"}\n')
    for _ in range(line_bytes >> 20):
        write(bytes(1 << 20))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_line_of_gigabytes_is_named_before_it_is_in_memory(suffix, tmp_path):
    """80 MiB take the place of 4 GB: what is read beyond the limit is at most a buffer."""
    path = tmp_path / f"lines{suffix}"
    if suffix.endswith("zst"):
        with pa.output_stream(str(path), compression="zstd") as stream:
            bomb(stream.write, 80 << 20)
    else:
        with gzip.open(path, "wb", 1) if suffix.endswith("gz") else path.open("wb") as stream:
            bomb(stream.write, 80 << 20)
    tracemalloc.start()
    with pytest.raises(ConfigError) as error:
        documents(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.value.value == f"{path}:2"
    assert error.value.rule == "is longer than 67,108,864 bytes"
    assert peak < 160 << 20


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_a_document_beyond_the_limit_is_named(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "MAX_DOCUMENT_CHARS", 100)
    path, texts = tmp_path / f"all{suffix}", ["x" * 100, "y" * 101]
    if suffix == ".jsonl":
        path.write_bytes(jsonl(texts))
    else:
        (write_parquet if suffix == ".parquet" else write_arrow)(path, texts)
    with pytest.raises(ConfigError, match=r"(:3|row 2)'.* 'text' is longer than 100 characters"):
        documents(path)


def test_the_line_that_is_not_utf8_is_found_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "READ_BYTES", 4)
    path = tmp_path / "all.txt"
    for text, line in (
        (b"a\nb\xc3\xa9c\nd\xff\n", 3),
        ("é\né".encode() * 9 + b"\n\xe2\x82", 11),
        (b"\xc3\n", 1),
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=rf"all\.txt:{line}'.*is not UTF-8"):
            documents(path)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_long_documents_come_in_pieces(suffix, tmp_path, monkeypatch):
    """Pieces are bounded, end after a line if they can, and are cut alike in every format."""
    monkeypatch.setattr(readers, "PIECE_CHARS", 100)
    text = "a line of text\n" * 20 + "x" * 250 + "\nend"
    path = tmp_path / f"long{suffix}"
    path.write_bytes(text.encode() if suffix == ".txt" else jsonl([text]))
    pieces = list(read_pieces(find_sources([str(path)]), ReadOptions()))
    assert "".join(p.text for p in pieces) == text
    assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [len(p.text) for p in pieces] == [90, 90, 90, 30, 100, 100, 54]


def test_position_reaches_the_end(texts, tmp_path):
    """Progress counts bytes over all files, and never falls back."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(texts))
    sources = find_sources([str(tmp_path)])
    positions = [piece.position for piece in read_pieces(sources, ReadOptions())]
    assert positions == sorted(positions)
    assert positions[-1] == sum(source.num_bytes for source in sources)


def test_stdlib():
    """Python's own sources are there, in order, and their tests' odd encodings are not."""
    sources = find_sources(["stdlib"])
    names = [source.path.name for source in sources]
    assert "argparse.py" in names and "module_koi8_r.py" not in names
    assert not [s for s in sources if "site-packages" in s.path.parts]
    assert [s.path for s in sources] == sorted(s.path for s in sources)
    first = next(read_pieces([s for s in sources if s.path.name == "argparse.py"], ReadOptions()))
    assert "class ArgumentParser" in first.text


@pytest.mark.parametrize(
    ("line", "where", "rule"),
    [
        (b'{"text": "cut', ":4", "is not valid JSON"),
        (b'{"text": "\xff"}', ":4", "is not valid JSON"),
        (b"[" * 100_000, ":4", "is not valid JSON"),
        (b'["text"]', ":4", "not a JSON object with the field 'text'"),
        (b'{"body": "x"}', ":4", "not a JSON object with the field 'text'"),
        (b'{"text": null}', ":4", "must be text, not NoneType"),
        (b'{"text": "\\ud800"}', ":4", "is not Unicode"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_broken_line(line, where, rule, suffix, tmp_path):
    """File, line, rule."""
    path = tmp_path / f"bad{suffix}"
    data = jsonl(["fine", "fine"]) + b"\n" + line
    path.write_bytes({".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)(data))
    with pytest.raises(ConfigError, match=rule) as error:
        documents(path)
    assert error.value.value == f"{path}{where}"


def test_broken_text(tmp_path):
    """The first line that is not UTF-8."""
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"fine\nfine\ncaf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8") as error:
        documents(path)
    assert error.value.value == f"{path}:3"


@pytest.mark.parametrize("keep", [20, -4])
def test_truncated_gzip(keep, tmp_path):
    """A download that stopped, in the data or in the checksum."""
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(["text"] * 1000))[:keep])
    with pytest.raises(ConfigError, match="is not a complete gzip file"):
        documents(path)


@pytest.mark.parametrize("damage", ["middle", "end", "bytes"])
def test_truncated_zstd(damage, tmp_path):
    """A download that stopped, in the data or in its last bytes; no Zstandard at all."""
    data = zstd(jsonl([f"text {i}" for i in range(20_000)]))
    spoilt = {"middle": data[: len(data) // 2], "end": data[:-3], "bytes": b"nonsense" * 9}
    path = tmp_path / "cut.jsonl.zst"
    path.write_bytes(spoilt[damage])
    with pytest.raises(ConfigError, match="is not a complete zstd file"):
        documents(path)


@pytest.mark.parametrize(("suffix", "name"), [(".gz", "gzip"), (".zst", "zstd")])
def test_a_compressed_file_of_no_bytes_is_cut_off(suffix, name, tmp_path):
    """A download that did not begin; one that holds no lines, and an empty plain file, are fine."""
    plain, path = tmp_path / "a.jsonl", tmp_path / f"b.jsonl{suffix}"
    plain.touch()
    path.write_bytes({"gzip": gzip.compress, "zstd": zstd}[name](b""))
    assert documents(plain, path) == []
    path.write_bytes(b"")
    with pytest.raises(
        ConfigError, match=f"is not a complete {name} file .it has 0 bytes"
    ) as error:
        documents(plain, path)
    assert error.value.value == str(path)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("damage", ["nonsense", "cut", "empty", "end"])
def test_broken_arrow(stream, damage, tmp_path):
    """No Arrow, or cut off; after which row, if some could be read."""
    path = tmp_path / "bad.arrow"
    write_arrow(path, [f"text {i}" for i in range(100)], stream=stream)
    data = path.read_bytes()
    ends = {"nonsense": b"ARROW1" + b"x" * 99, "cut": data[:-900], "empty": b"", "end": data[:-8]}
    path.write_bytes(ends[damage])
    with pytest.raises(ConfigError, match="is not readable Arrow") as error:
        documents(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    write_arrow(path, ["a", None], stream=stream)
    with pytest.raises(ConfigError, match=r"row 2.*must be text, not NoneType"):
        documents(path)
    with pytest.raises(ConfigError, match="has no column 'body', only id, text"):
        documents(path, text_field="body")


def test_broken_parquet(tmp_path):
    """No Parquet, no such column, a number, a missing value."""
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="is not readable Parquet"):
        documents(path)
    write_parquet(path, ["a", "b", None])
    with pytest.raises(ConfigError, match="has no column 'body', only id, text"):
        documents(path, text_field="body")
    with pytest.raises(ConfigError, match=r"row 1.*must be text, not int"):
        documents(path, text_field="id")
    with pytest.raises(ConfigError, match=r"row 3.*must be text, not NoneType"):
        documents(path)


def test_inputs_that_cannot_be_used(tmp_path):
    """Missing, of no known kind, without documents, none."""
    (tmp_path / "picture.png").touch()
    for name, rule in [
        ("missing.txt", "does not exist"),
        ("picture.png", r"is not one of \.txt, \.jsonl"),
        (".", r"has no \.txt, \.jsonl"),
    ]:
        with pytest.raises(ConfigError, match=rule):
            find_sources([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="must not be empty"):
        find_sources([])
