"""Copies text into Zstandard files of small frames, which can be read from many places."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxpar.config import ConfigError
from jaxpar.config.options import check_ranges
from jaxpar.config.rules.paths import check_path
from jaxpar.data.formats.compressed import RowCounts, import_pyarrow, input_error, reading
from jaxpar.data.formats.json_file import json_texts
from jaxpar.data.formats.readers import ReadOptions, read_jsonl, read_text
from jaxpar.data.options import ReframeOptions
from jaxpar.data.prepare.documents import InputFile, Wanted, find_sources, kind_of
from jaxpar.data.prepare.progress import PreparationProgress
from jaxpar.runtime.files import atomic
from jaxpar.runtime.units import size

#: Bytes of text in a frame; a line is in one frame.
FRAME_BYTES = 1 << 20


def reframe(options: ReframeOptions, progress: PreparationProgress | None = None) -> str:
    """Copy the documents of files. Returns: a summary of one line.

    Raises:   ConfigError that names an option, or an unreadable file.
    """
    check_ranges(options)
    progress = progress or PreparationProgress()
    check_path("--output", options.output, "use a folder of this computer")
    rows = RowCounts(options.on_bad_row)
    wanted = Wanted(fields=(options.text_field,), by_name=True)
    sources = find_sources(options.input, wanted, progress.log)
    targets = [_target(source, Path(options.output)) for source in sources]
    for target in targets:
        if target.exists() or targets.count(target) > 1:
            rule = "exists" if target.exists() else "is the copy of two inputs"
            raise ConfigError("--output", str(target), rule, "use another folder")
    Path(options.output).mkdir(parents=True, exist_ok=True)
    total, before, written = sum(source.num_bytes for source in sources), 0, 0
    for source, target in zip(sources, targets, strict=True):
        with reading(source.path):
            file = source.path.open("rb")
        with file, _complete(target) as copy:
            for frame in _frames(_lines(file, source, options.text_field, rows)):
                codec = import_pyarrow(target).Codec("zstd", options.level)
                written += copy.write(codec.compress(frame, asbytes=True))
                read = source.num_bytes if file.closed else file.tell()  # pyarrow closes it
                progress.advance(before + read, total, 0)
        before += source.num_bytes
    done = f"{options.output}: {len(targets):,} files, {size(written)}"
    return "\n  ".join([done, *rows.lines()])


def _target(source: InputFile, folder: Path) -> Path:
    if source.read is read_text:
        rule, fix = "is text that needs no frames", "name only the other files"
        raise input_error(str(source.path), rule, fix)
    stem = source.path.name[: -len(kind_of(source.path))]
    return folder / f"{stem}.jsonl.zst"


def _lines(file: BinaryIO, source: InputFile, text_field: str, rows: RowCounts) -> Iterator[bytes]:
    with reading(source.path):
        if source.read is read_jsonl:
            for found in json_texts(file, source.path, rows):
                line = found.data.strip()
                if b"\n" in line:  # an indented value
                    line = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8")
                yield line + b"\n"
            return
        text = ""
        for piece in source.read(
            file, source.path, ReadOptions(text_field, partly=True, rows=rows)
        ):
            text += piece.text
            if piece.last:
                yield json.dumps({"text": text}, ensure_ascii=False).encode("utf-8") + b"\n"
                text = ""


def _frames(lines: Iterator[bytes]) -> Iterator[bytes]:
    held, size = list[bytes](), 0
    for line in lines:
        if held and size + len(line) > FRAME_BYTES:
            yield b"".join(held)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield b"".join(held)


@contextmanager
def _complete(target: Path) -> Iterator[BinaryIO]:
    """Yield a file that is renamed to `target` at the end, or deleted if the block fails."""
    with atomic.new_file(target) as temporary, temporary.open("wb") as file:
        yield file
