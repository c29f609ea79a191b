"""What the GPUs of this host draw and how fast they run while steps are timed.

Matmuls of training are held by the power limit: how far, a card should say. `nvidia-smi` looks
every quarter of a second, in a process of its own that only reads.
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

#: As in `nvidia_smi.FIELDS`; a driver that does not know one gives no samples, and says so.
FIELDS = (
    "timestamp",
    "index",
    "power.draw",
    "clocks.current.sm",
    "clocks_event_reasons.active",
    "temperature.gpu",
)
MILLISECONDS = 250
#: Seconds that it may take to end.
PATIENCE = 5.0
_TIME = "%Y/%m/%d %H:%M:%S.%f"

type Sample = dict[str, str]


@dataclass
class Watch:
    """Samples since `since`, which whoever times sets when the warm-up has ended."""

    missing: str = ""
    since: datetime | None = None
    text: str = ""

    def begin(self) -> None:
        """What was seen before is left out."""
        self.since = datetime.now()

    def card(self) -> dict[str, Any]:
        """The card's entry; null, with the reason, where nothing was seen."""
        samples = list(_samples(self.text.splitlines(), self.since))
        if samples:
            return {"power": summed(samples)}
        said = " ".join(self.text.split())[:200]
        return {"power": None, "power_missing": self.missing or said or "no sample in that time"}


@contextlib.contextmanager
def watch_power(on_gpu: bool) -> Iterator[Watch]:
    """Look at this process's GPUs from here to the end of the block; then there is a card.

    Args:     on_gpu: whether there are any.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command += [*(["--id", visible] if visible else []), f"--loop-ms={MILLISECONDS}"]
    if not on_gpu:
        yield Watch(missing="no GPU")
        return
    with tempfile.TemporaryFile("w+") as output:  # a pipe would fill up, and hold it
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
    """The whole lines from `since` on; others are messages, or were cut off at the end."""
    for row in csv.reader(lines):
        cells = [cell.strip() for cell in row]
        if len(cells) == len(FIELDS):
            with contextlib.suppress(ValueError):
                if since is None or datetime.strptime(cells[0], _TIME) >= since:
                    yield dict(zip(FIELDS, cells, strict=True))


def summed(samples: list[Sample]) -> dict[str, Any]:
    """Means over the samples, of all GPUs and of each."""
    gpus = sorted({sample["index"] for sample in samples}, key=lambda index: (len(index), index))
    of_each = {gpu: _means([s for s in samples if s["index"] == gpu]) for gpu in gpus}
    return {**_means(samples), "samples": len(samples) // len(gpus), "gpus": of_each}


def _means(samples: list[Sample]) -> dict[str, float | None]:
    """Watts and megahertz; the share of samples at the power limit; the highest temperature."""
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
    """One line for the console; empty where nothing was seen."""
    power = result.get("power")
    if not power or power["watts"] is None or power["sm_mhz"] is None:
        return ""
    held = f"{power['at_power_limit']:.0%} of the time at the power limit"
    return f"GPUs: {power['watts']:.0f} W, {power['sm_mhz']:,.0f} MHz, {held}"
