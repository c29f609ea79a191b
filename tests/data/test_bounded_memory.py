"""Files larger than memory: what `prepare` holds does not grow with its input."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.data.formats.meta import read_meta

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[2]

#: Writes and prepares each format at two sizes: SMALL LARGE FOLDER. Prints peak memory, in bytes.
PROGRAM = """
import json, resource, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from jaxpar.data.prepare.text import PrepareOptions, prepare

TEXT = "the quick brown fox jumps over the lazy dog\\n" * 90

def write(path, rows):
    batches = ([f"{start + i} {TEXT}" for i in range(64)] for start in range(0, rows, 64))
    schema = pa.schema([("text", pa.string())])
    if path.suffix == ".parquet":  # one row group, as large as the file
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            writer.write_table(pa.table({"text": sum(batches, [])}), row_group_size=rows)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), schema) as writer:
            for batch in batches:
                writer.write_table(pa.table({"text": batch}))
    else:
        compression = "zstd" if path.suffix == ".zst" else None
        with pa.output_stream(str(path), compression=compression) as lines:
            for batch in batches:
                lines.write("".join(json.dumps({"text": t}) + "\\n" for t in batch).encode())

kinds = [".jsonl", ".jsonl.zst", ".arrow", ".parquet"]
folder, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]
if sizes[0] == 0:
    for rows in sizes[1:]:
        for kind in kinds:
            write(folder / f"{rows}{kind}", rows)
else:
    for rows in sizes:
        for kind in kinds:
            options = {"output": str(folder / f"{rows}{kind}.out"), "workers": 1}
            prepare(PrepareOptions(input=(str(folder / f"{rows}{kind}"),), **options))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def run(folder: Path, *sizes: int) -> list[int]:
    command = [sys.executable, "-c", PROGRAM, str(folder), *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path):
    """Six times the input, 25 MB of text in each of four formats, for less than 16 MB more."""
    small, large = 1024, 6144
    run(tmp_path, 0, small, large)
    before, after = run(tmp_path, small, large)
    text = sum((tmp_path / f"{large}{kind}").stat().st_size for kind in (".jsonl", ".arrow"))
    assert text > 45e6
    meta = read_meta(tmp_path / f"{large}.parquet.out")
    assert sum(split.num_documents for split in meta.splits.values()) == large
    assert after - before < 16e6, f"{before / 1e6:.0f} MB, then {after / 1e6:.0f} MB"
