"""What a conversion says of its memory, on systems that tell less than Linux does."""

import pytest

from jaxpar.data.prepare.progress import PreparationProgress
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


def test_a_log_has_a_line_from_time_to_time_with_the_time_left(monkeypatch, capsys):
    """4 MB/s from 10 MB on, of 110 MB: after 20 s, 90 MB were done in all."""
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = PreparationProgress(progress.Bar(None))
    for second in range(21):
        now = 1000.0 + second
        shown.advance(10_000_000 + 4_000_000 * second, 110_000_000, second)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "50.0 MB of 110.0 MB, 10 tokens, 15 s left",
        "90.0 MB of 110.0 MB, 20 tokens, 5 s left",
    ]
    now = 1031.0
    shown.advance(0, 50_000_000, 0)  # another split
    assert capsys.readouterr().err == "0 bytes of 50.0 MB, 0 tokens\n"
