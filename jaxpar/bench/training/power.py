"""Records the power and clocks of this host's GPUs while steps are timed.

The power limit slows the matmuls of training, so a card records by how much. `nvidia-smi` samples
every quarter of a second in a separate process.
"""

import contextlib
import csv
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jaxpar.runtime.gpus.nvidia_smi import NOT_INSTALLED, at_power_limit, number

#: As in `nvidia_smi.FIELDS`. A driver that does not support a field prints an error and no samples.
FIELDS = (
    "timestamp",
    "index",
    "power.draw",
    "clocks.current.sm",
    "clocks_event_reasons.active",
    "temperature.gpu",
)
MILLISECONDS = 250
#: Seconds to wait for nvidia-smi to end.
PATIENCE = 5.0
_TIME = "%Y/%m/%d %H:%M:%S.%f"

type Sample = dict[str, str]


@dataclass
class Watch:
    """Samples since `since`, which the benchmark sets after the warm-up."""

    missing: str = ""
    since: datetime | None = None
    text: str = ""

    def begin(self) -> None:
        """Discard earlier samples."""
        self.since = datetime.now()

    def card(self) -> dict[str, Any]:
        """Return the card's entry; None and the reason if there are no samples."""
        samples = list(_samples(self.text.splitlines(), self.since))
        if samples:
            return {"power": summed(samples)}
        said = " ".join(self.text.split())[:200]
        return {"power": None, "power_missing": self.missing or said or "no samples"}


@contextlib.contextmanager
def watch_power(on_gpu: bool) -> Iterator[Watch]:
    """Sample this process's GPUs within this context. The card is available afterwards.

    Args:     on_gpu: whether there are GPUs.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command += [*(["--id", visible] if visible else []), f"--loop-ms={MILLISECONDS}"]
    if not on_gpu:
        yield Watch(missing="no GPU")
        return
    with tempfile.TemporaryFile("w+") as output:  # a pipe would fill up and block it
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            yield Watch(missing=NOT_INSTALLED if gone else str(error))
            return
        watch = Watch()
        try:
            yield watch
        finally:
            _end(process)
            output.seek(0)
            watch.text = output.read()


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _samples(lines: Iterable[str], since: datetime | None) -> Iterator[Sample]:
    """Yield the complete samples since `since`; other lines are messages or truncated."""
    for row in csv.reader(lines):
        cells = [cell.strip() for cell in row]
        if len(cells) == len(FIELDS):
            with contextlib.suppress(ValueError):
                if since is None or datetime.strptime(cells[0], _TIME) >= since:
                    yield dict(zip(FIELDS, cells, strict=True))


def summed(samples: list[Sample]) -> dict[str, Any]:
    """Return means over the samples, for all GPUs and for each."""
    gpus = sorted({sample["index"] for sample in samples}, key=lambda index: (len(index), index))
    of_each = {gpu: _means([s for s in samples if s["index"] == gpu]) for gpu in gpus}
    return {**_means(samples), "samples": len(samples) // len(gpus), "gpus": of_each}


def _means(samples: list[Sample]) -> dict[str, float | None]:
    """Return mean power and clock, share of samples at the power limit, highest temperature."""
    values = lambda field: [  # noqa: E731
        value for sample in samples if (value := number(sample, field)) is not None
    ]
    mean = lambda found: statistics.fmean(found) if found else None  # noqa: E731
    return {
        "watts": mean(values("power.draw")),
        "sm_mhz": mean(values("clocks.current.sm")),
        "at_power_limit": statistics.fmean(map(at_power_limit, samples)),
        "celsius": max(values("temperature.gpu"), default=None),
    }


def in_words(result: dict[str, Any]) -> str:
    """Format the power in one line; empty if there are no samples."""
    power = result.get("power")
    if not power or power["watts"] is None or power["sm_mhz"] is None:
        return ""
    held = f"{power['at_power_limit']:.0%} of the time at the power limit"
    return f"GPUs: {power['watts']:.0f} W, {power['sm_mhz']:,.0f} MHz, {held}"
