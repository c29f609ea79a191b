"""What a card records besides times: conditions, the load of experts, power and clocks of GPUs."""

import contextlib
import datetime
import hashlib
import os
import platform
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxpar.jax_private.table import CUDA_VERSIONS
from jaxpar.monitoring.routing import RecordedRouting
from jaxpar.runtime import provenance
from jaxpar.runtime.gpus import nvml, visible, xla_flags
from jaxpar.runtime.gpus.nvml import GpuLoad

# ---------------------------------------- The conditions of a measurement, which every card records


def of_this_process(environment: list[str], commit: str) -> dict[str, Any]:
    """Return versions, devices, GPU, flags, commit, time and host for a card.

    The values do not depend on where jaxpar is installed.
    """
    versions = provenance.versions()
    return {
        **versions,
        "xla_flags": xla_flags.alike_everywhere(versions["xla_flags"]),
        "gpu": gpu_facts(),
        "environment": [xla_flags.alike_everywhere(setting) for setting in environment],
        "commit": commit,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": host(),
    }


def host() -> str:
    """Return an anonymous ID of the host, which changes when it reboots."""
    try:  # shared by the containers of a host, whose names differ
        named = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        named = platform.node()
    return hashlib.sha256(named.strip().encode()).hexdigest()[:8]


def gpu_facts() -> str:
    """Return name, driver and power limit of the first GPU; empty without a GPU."""
    try:
        gpu = nvml.gpus()[0]
    except nvml.Unavailable:
        return ""
    limit = "[N/A]" if gpu.power_limit is None else f"{gpu.power_limit:.2f} W"
    return f"{gpu.name}, {gpu.driver_version}, {limit}"


def cudnn_version() -> int:
    """Return the version of cuDNN that JAX loaded, such as 91900; 0 without cuDNN."""
    cuda_versions = CUDA_VERSIONS.load().cuda_versions
    return 0 if cuda_versions is None else cuda_versions.cudnn_get_version()


# ------------------------- The experts of a measurement: how even the loads of the timed steps were


#: What chose each token's experts, if no recorded routing did: loads are never forced to be even.
FRESH = "fresh router"

#: With fewer steps before the timed ones, a router counts as fresh.
LEARNED = 20

#: Metrics of a step that a card has, if the step has them.
METRICS = (
    "expert_entropy",
    "fullest_expert",
    "fullest_rank",
    "fullest_rank_mean",
    "further_rounds",
    "dropped_rows",
)


def of_steps(
    measured: Sequence[Any], routing: RecordedRouting | None = None, steps_before: int = 0
) -> dict[str, Any]:
    """Return the card's entry for the experts; empty without experts.

    Args:     measured: `Metrics` of each timed step. routing: what they repeated.
              steps_before: number of steps in which the router learned.
    """
    there = [name for name in METRICS if name in measured[0]]
    if not there:
        return {}
    steps = jax.device_get([{name: m[name] for name in there} for m in measured])
    spread = {name: _spread([float(step[name]) for step in steps]) for name in there}
    chosen = FRESH if steps_before < LEARNED else f"router after {steps_before} steps"
    return {"experts": {"routing": str(routing or chosen)} | spread}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def experts_in_words(card: dict[str, Any]) -> str:
    """Format the entry as a line; empty without one."""
    found = card.get("experts")
    if not found:
        return ""
    median = lambda name: found[name]["median"]  # noqa: E731
    parts = [f"fullest expert {median('fullest_expert'):.2f} times the mean"]
    if "fullest_rank" in found:
        mean = f"{median('fullest_rank_mean'):.2f} in the mean layer"
        parts.append(f"fullest rank {median('fullest_rank'):.2f} times ({mean})")
        parts.append(f"{median('further_rounds'):,.0f} further rounds")
    parts.append(f"dropped {found['dropped_rows']['most']:,.0f}")
    return f"experts: {', '.join(parts)} per step; routing {found['routing']}"


# --------------------------- Records the power and clocks of this host's GPUs while steps are timed
#
# The power limit slows the matmuls of training, so a card records by how much. A thread asks the
# driver every quarter of a second.


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


def power_in_words(result: dict[str, Any]) -> str:
    """Format the power in one line; empty if there are no samples."""
    power = result.get("power")
    if not power or power["watts"] is None or power["sm_mhz"] is None:
        return ""
    held = f"{power['at_power_limit']:.0%} of the time at the power limit"
    return f"GPUs: {power['watts']:.0f} W, {power['sm_mhz']:,.0f} MHz, {held}"
