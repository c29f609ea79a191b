"""The figures of a run that the report, its --list and sweeps show: one definition each.

A run may have been resumed on other devices, and its steps may change their size. What is per
device and token is of all steps. What depends on the devices and the size of a step, such as the
time of a step, is of the steps since these last changed: the run's latest *layout*.
"""

from dataclasses import dataclass, field
from typing import Any

from jaxpar.tools.report.series import Sizes

#: Metrics of a record that say how its steps were run, besides the number of devices.
_SIZE = ("global_batch_size", "seq_len")


@dataclass
class Speed:
    """The speed of a run, from its records."""

    rates: Sizes = field(default_factory=Sizes)
    """Tokens per second and device, of all records."""
    mfu: Sizes = field(default_factory=Sizes)
    """Shares, of all records."""
    step_seconds: Sizes = field(default_factory=Sizes)
    """Of the records of the latest layout."""
    devices: int = 0
    """Of the latest layout; 0 if not recorded."""
    _layout: Any = None

    def add(self, values: dict[str, float], predicted: dict[str, float]) -> None:
        """Add a record.

        Args:
          values: its metrics.
          predicted: what the planner predicted when these steps were started; other predictions
            mean another layout.
        """
        rate = values.get("tokens_per_second_per_device", 0.0)
        if rate <= 0 or "step_seconds" not in values:
            return
        devices = round(values.get("tokens_per_second", 0.0) / rate)
        layout = devices, [values.get(name) for name in _SIZE], predicted
        if layout != self._layout:
            self._layout, self.devices, self.step_seconds = layout, devices, Sizes()
        self.rates.add(rate)
        self.mfu.add(values.get("mfu", 0.0))
        self.step_seconds.add(values["step_seconds"])

    @property
    def throughput(self) -> float | None:
        """Tokens per second and device: the median of all records."""
        return self.rates.quantile(0.5) if self.rates else None

    @property
    def step_time(self) -> float | None:
        """Seconds: the median of the records of the latest layout."""
        return self.step_seconds.quantile(0.5) if self.step_seconds else None


def held_out_text(config: dict[str, Any]) -> str:
    """Return what a run's held-out loss is measured on, from its config.json.

    Nats per token compare only between runs with the same tokens and the same objective.
    """
    at = lambda section, name: _section(config, section).get(name)  # noqa: E731
    data = at("data", "held_out") or at("data", "mixture") or at("data", "path") or "unknown data"
    words = [str(data), f"vocabulary of {at('model', 'vocab_size')}"]
    if (split := at("evaluation", "split")) not in (None, "val"):
        words.append(f"split {split}")
    if beta := at("dpo", "beta"):
        words.append(f"preference pairs, beta {beta}")
    return ", ".join(words)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}
