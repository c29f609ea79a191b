"""A piece of a real trace.

Two backward layers of Llama 3 8B, T=8192, under FSDP, on two of four H200s, in two steps: cut from
a trace of JAX 0.11.2 with all kernels between two instructions of the schedule, and the host's
events that launched them; with those instructions of the optimized HLO.
"""

import gzip
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def real_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace's file."""
    path = tmp_path_factory.mktemp("trace") / "fsdp4.xplane.pb"
    path.write_bytes(gzip.decompress((HERE / "fsdp4.xplane.pb.gz").read_bytes()))
    return path


@pytest.fixture(scope="session")
def real_hlo() -> str:
    """The instructions that run in it."""
    return gzip.decompress((HERE / "fsdp4.hlo.txt.gz").read_bytes()).decode()
