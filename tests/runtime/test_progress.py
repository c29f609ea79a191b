"""What a conversion says of its memory, on systems that tell less than Linux does."""

import pytest

from jaxpar.runtime import progress

#: As gVisor writes it.
LITTLE = "Name:\tpython\nFDSize:\t9\nVmSize:\t4000 kB\nVmRSS:\t3000 kB\nThreads:\t2\n"


@pytest.mark.parametrize(
    ("text", "peak"), [(LITTLE + "VmHWM:\t3500 kB\n", 3_584_000), (LITTLE, 0), (None, 0)]
)
def test_where_the_peak_is_not_told(text, peak, tmp_path, monkeypatch):
    status = tmp_path / "status"
    if text is not None:
        status.write_text(text)
    monkeypatch.setattr(progress, "_STATUS", status)
    monkeypatch.setattr(progress, "_RESET", tmp_path / "none" / "clear_refs")
    found = progress.peak_memory()
    assert found == peak if peak else found > 10_000_000  # getrusage's, of this process
    with progress.meter(1000) as meter:
        meter.advance(1000)
    assert meter.summary(500).startswith("1.0 kB in ")
