"""Records the power and clocks of this host's GPUs while steps are timed.

The power limit slows the matmuls of training, so a card records by how much. A thread asks the
driver every quarter of a second.
"""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.runtime.gpus import nvml, visible
from jaxpar.runtime.gpus.nvml import GpuLoad

#: Seconds between samples.
EVERY = 0.25
#: Seconds to wait for a driver that does not respond.
PATIENCE = 5.0


@dataclass
class Watch:
    """Samples since `begin`, which the benchmark calls after the warm-up.

    samples   one for each GPU at each moment. missing   why there are none.
    """

    missing: str = ""
    samples: list[GpuLoad] = field(default_factory=list)

    def begin(self) -> None:
        """Discard earlier samples."""
        self.samples.clear()

    def card(self) -> dict[str, Any]:
        """Return the card's entry; None and the reason if there are no samples."""
        if self.samples:
            return {"power": summed(self.samples)}
        return {"power": None, "power_missing": self.missing or "no samples"}


@contextlib.contextmanager
def watch_power(on_gpu: bool) -> Iterator[Watch]:
    """Sample this process's GPUs within this context. The card is available afterwards.

    Args:     on_gpu: whether there are GPUs.
    """
    if not on_gpu:
        yield Watch(missing="no GPU")
        return
    watch, over = Watch(), threading.Event()
    thread = threading.Thread(target=_sample, args=(watch, over), name="power", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join(PATIENCE)


def _sample(watch: Watch, over: threading.Event) -> None:
    """Add samples until it is over, or the driver has lost a GPU."""
    ids = visible.visible_gpu_ids() if os.environ.get("CUDA_VISIBLE_DEVICES") else None
    try:
        with nvml.opened():
            while not over.is_set():
                began = time.monotonic()
                watch.samples += nvml.loads(ids)
                over.wait(EVERY - (time.monotonic() - began))
    except nvml.Unavailable as error:
        watch.missing = str(error)


def summed(samples: Sequence[GpuLoad]) -> dict[str, Any]:
    """Return means over the samples, for all GPUs and for each."""
    gpus = sorted({sample.index for sample in samples})
    of_each = {str(gpu): _means([s for s in samples if s.index == gpu]) for gpu in gpus}
    return {**_means(samples), "samples": len(samples) // len(gpus), "gpus": of_each}


def _means(samples: Sequence[GpuLoad]) -> dict[str, float | None]:
    """Return mean power and clock, share of samples at the power limit, highest temperature."""
    watts = [sample.power_draw for sample in samples if sample.power_draw is not None]
    clocks = [sample.sm_clock for sample in samples if sample.sm_clock is not None]
    heat = [sample.temperature for sample in samples if sample.temperature is not None]
    return {
        "watts": statistics.fmean(watts) if watts else None,
        "sm_mhz": statistics.fmean(clocks) if clocks else None,
        "at_power_limit": statistics.fmean(sample.at_power_limit for sample in samples),
        "celsius": max(heat, default=None),
    }


def in_words(result: dict[str, Any]) -> str:
    """Format the power in one line; empty if there are no samples."""
    power = result.get("power")
    if not power or power["watts"] is None or power["sm_mhz"] is None:
        return ""
    held = f"{power['at_power_limit']:.0%} of the time at the power limit"
    return f"GPUs: {power['watts']:.0f} W, {power['sm_mhz']:,.0f} MHz, {held}"
