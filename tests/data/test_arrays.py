"""Arrays in files and in parts: the same elements, few open files, little that is read."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config import ConfigError
from jaxpar.data.formats import arrays, writer
from jaxpar.data.formats.arrays import (
    MAX_OPEN,
    DocumentOffsets,
    FileArray,
    Joined,
    SortedFile,
    most_documents,
)
from jaxpar.data.packing import Disordered, document_begins

RNG = np.random.default_rng(0)


def documents(folder: Path, tokens: list[int]) -> tuple[list[SortedFile], np.ndarray]:
    """Parts with random documents, as files; and all their offsets."""
    parts, every = [], [np.zeros(1, np.int64)]
    for number, count in enumerate(tokens):
        inner = np.sort(RNG.choice(np.arange(1, count), min(count // 9, count - 1), replace=False))
        offsets = np.concatenate([[0], inner, [count]])
        np.save(folder / f"{number}.npy", offsets)
        parts.append(SortedFile(folder / f"{number}.npy", np.dtype("<i8"), len(offsets), 128))
        every.append(every[-1][-1] + offsets[1:])
    return parts, np.concatenate(every)


def test_stretches_of_files_in_a_row(tmp_path):
    """Within a file and over several, behind headers; more files than may be open."""
    values = RNG.integers(0, 60_000, 9_000).astype("<u2")
    ends = np.unique(np.append(RNG.integers(1, 9_000, MAX_OPEN + 50), 9_000)).tolist()
    files = []
    for first, end in zip([0, *ends], ends, strict=False):
        path = tmp_path / f"{first}.bin"
        path.write_bytes(b"header" + values[first:end].tobytes())
        files.append(FileArray(path, values.dtype, end - first, 6))
    joined = Joined(files)
    before = len(os.listdir("/proc/self/fd"))
    for length in (1, 2, 30, 500):
        starts = RNG.integers(0, 9_001 - length, 200)
        expected = np.lib.stride_tricks.sliding_window_view(values, length)[starts]
        np.testing.assert_array_equal(joined.windows(starts, length), expected)
    np.testing.assert_array_equal(joined[:], values)
    assert len(os.listdir("/proc/self/fd")) <= before + MAX_OPEN
    os.truncate(files[-1].file, 6)
    with pytest.raises(ConfigError, match=r"\.bin ends before byte .*copy the file again"):
        joined[-1]


@pytest.mark.parametrize("tokens", [[50], [1, 2, 1, 300], [400, 30, 30, 30, 900]])
def test_documents_of_parts_are_those_of_one(tokens, tmp_path, monkeypatch):
    """As np.searchsorted and indexing of all; also the most of them that begin near another."""
    monkeypatch.setattr(arrays, "AT_ONCE", 16)
    monkeypatch.setattr(arrays, "PAGE", 4)
    parts, every = documents(tmp_path, tokens)
    for offsets in (DocumentOffsets(parts), DocumentOffsets([part[:] for part in parts])):
        values = np.arange(-2, every[-1] + 3)
        for side in ("left", "right"):
            found = offsets.searchsorted(values, side=side)
            np.testing.assert_array_equal(found, every.searchsorted(values, side=side))
        places = RNG.integers(0, len(every), 99)
        np.testing.assert_array_equal(offsets[places], every[places])
        for first, end in RNG.integers(0, len(every) + 1, (20, 2)):
            np.testing.assert_array_equal(offsets[first:end], every[first:end])
        for length in (1, 8, 64, 1024):
            begins = every[:-1]
            most = max(np.sum((begins >= at) & (begins < at + length)) for at in begins)
            tables = [most_documents(part) for part in offsets.parts]
            assert offsets.most(length) == offsets.most(length, tables) == most
            assert [table[-1] for table in tables] == [len(part) - 1 for part in parts]


def test_where_documents_begin(tmp_path):
    parts, every = documents(tmp_path, [400, 30, 30, 30, 900])
    for length in (7, 16, 100):
        indices = np.arange((every[-1] - 1) // length)
        begins = document_begins(DocumentOffsets(parts), indices, length)
        expected = np.isin(indices[:, None] * length + np.arange(length + 1), every)
        expected[:, 0] = False
        np.testing.assert_array_equal(begins, expected)


@pytest.mark.parametrize("offset", [10**9, -5])
def test_documents_that_are_not_in_order_are_found_where_they_are_read(offset):
    """Wherever a search ends there: it is an error that names the place, or the right segments."""
    offsets = np.arange(0, 1001, 10)
    damaged = offsets.copy()
    damaged[37] = offset
    found = 0
    for index in range(99):
        try:
            got = document_begins(damaged, np.array([index]), 10 + index % 7)
        except Disordered as error:
            found += 1
            assert abs(error.args[0] - 37) <= 3
        else:
            expected = document_begins(offsets, np.array([index]), 10 + index % 7)
            np.testing.assert_array_equal(got, expected)
    assert found


def test_offsets_are_written_in_blocks(tmp_path, monkeypatch):
    """The file is that of np.save, without all of them in memory."""
    monkeypatch.setattr(writer, "FLUSH_DOCUMENTS", 100)
    ends = np.cumsum(RNG.integers(1, 9, 1000))
    one = writer.OffsetsWriter(tmp_path / "blocks.npy")
    for end in ends[:550].tolist():
        one.append(end)
        assert len(one._held) < 100
    one.extend(ends[550:])
    one.close()
    np.save(tmp_path / "whole.npy", np.append(0, ends).astype("<i8"))
    assert (tmp_path / "blocks.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
