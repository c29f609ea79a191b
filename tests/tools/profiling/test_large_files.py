"""A small compressed file may contain gigabytes: traces and programs are read up to a limit."""

import gzip
import shutil
import tracemalloc
from pathlib import Path

import pytest

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.tools.profiling.trace import xspace

PIECE = Path(__file__).parent / "fsdp4.xplane.pb.gz"


@pytest.mark.parametrize("name", ["bomb.xplane.pb.gz", "bomb.xplane.pb"])
def test_a_trace_of_gigabytes_is_not_read(name, tmp_path, monkeypatch):
    """64 MiB of zeros, or 3 GB, in a small file: at most the limit is decompressed."""
    monkeypatch.setattr(xspace, "MAX_BYTES", 1 << 20)
    data = bytes(64 << 20)
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    tracemalloc.start()
    with pytest.raises(ConfigError) as error:
        call("profile", [str(tmp_path / name)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "is not a profiler trace or is truncated: it has more than 1,048,576 bytes" in (
        error.value.rule
    )
    assert peak < 8 << 20


def test_hlo_of_gigabytes_is_left_out(tmp_path, monkeypatch, capsys):
    size = max(len(gzip.decompress(PIECE.read_bytes())), 1 << 20)
    monkeypatch.setattr(xspace, "MAX_BYTES", size)
    shutil.copy(PIECE, tmp_path / "process_0.xplane.pb.gz")
    (tmp_path / "step.hlo.txt.gz").write_bytes(gzip.compress(bytes(size + 1), 1))
    call("profile", [str(tmp_path)])
    assert "the HLO in step.hlo.txt.gz: the file cannot be read: it has more" in " ".join(
        capsys.readouterr().out.split()
    )
