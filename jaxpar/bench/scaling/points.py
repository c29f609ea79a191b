"""The points of a scaling curve: a mesh and a batch for each number of devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.config import Config, ConfigError, flag, replace, value_of
from jaxpar.config.validate import resolve
from jaxpar.sharding.axes import AXES, DATA, EXPERT, PIPELINE

#: Axes that can grow. Experts do not use the expert axis yet.
GROWING = tuple(axis for axis in AXES if axis != EXPERT)

#: Weak scaling: the batch grows with the devices. Strong scaling: it does not.
MODES = ("weak", "strong")


@dataclass(frozen=True)
class ScalingPoint:
    """One measurement: the fields of the config that it sets, and their values."""

    axis: str
    mode: str
    devices: int
    settings: tuple[tuple[str, Any], ...]

    @property
    def flags(self) -> list[str]:
        """Command-line options for the settings."""
        return [word for path, value in self.settings for word in flag(path, value).split()]

    @property
    def name(self) -> str:
        """What the point is, in words."""
        return f"{self.mode}, {self.axis}, {count_of(self.devices)}"


def count_of(devices: int) -> str:
    """Return "1 device" or "4 devices"."""
    return f"{devices} device" + "s" * (devices != 1)


def counts_for(cfg: Config, axes: Sequence[str], present: int) -> list[int]:
    """Return the default numbers of devices: powers of two times the axes that do not grow.

    Args:     axes: those that grow, one after another. present: available devices.
    Raises:   ConfigError if there are fewer than two such numbers.
    """
    least = math.lcm(*(others(cfg, axis) for axis in axes))
    counts = [least * 2**power for power in range(present.bit_length())]
    counts = [count for count in counts if count <= present]
    if len(counts) < 2:
        rule = f"needs at least {count_of(2 * least)}, but there " + _present(present)
        raise ConfigError("--gpus", None, rule, _simulate(2 * least))
    return counts


def check_present(counts: Sequence[int], present: int) -> None:
    """Raise ConfigError if a number of devices exceeds those that are present."""
    if counts[-1] > present:
        rule = "needs more devices than there are: there " + _present(present)
        fits = [count for count in counts if count <= present]
        fix = f"use --gpus {_listed(fits)}, or " if len(fits) > 1 else ""
        raise ConfigError("--gpus", _listed(counts), rule, fix + _simulate(counts[-1]))


def _present(number: int) -> str:
    return f"{'is' if number == 1 else 'are'} {number}"


def _simulate(number: int) -> str:
    return f"add {flag('run.cpu_devices', number)} to simulate devices on a CPU"


def _listed(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))


def others(cfg: Config, axis: str) -> int:
    """Return the product of all axes but one. An undefined data axis counts as 1."""
    sizes = (value_of(cfg, f"parallel.{other}") for other in AXES if other != axis)
    return math.prod(max(size, 1) for size in sizes)


def all_points(
    cfg: Config, counts: Sequence[int], axes: Sequence[str], modes: Sequence[str]
) -> list[ScalingPoint]:
    """Return the points of every axis and mode, and check the config of each.

    The config's batch is that of the fewest devices.

    Args:     cfg: checked. counts: numbers of devices, ascending.
    Raises:   ConfigError for a config that leaves the layout to the planner, and for the first
              point that breaks a rule.
    """
    if cfg.parallel.auto:
        rule = "leaves the layout to the planner, but scaling compares given layouts"
        fix = f"use {flag('parallel.auto', '')}, and name the axes"
        raise ConfigError("parallel.auto", cfg.parallel.auto, rule, fix)
    named = [(axis, mode) for axis in axes for mode in modes]
    made, wrong = [], dict[int, ConfigError]()
    for devices in counts:
        for axis, mode in named:
            try:
                made.append(_point(cfg, axis, mode, devices, counts[0]))
            except ConfigError as error:
                wrong.setdefault(devices, _of_point(error, axis, mode, devices))
    if wrong:
        first = next(iter(wrong.values()))
        fits = [count for count in counts if count not in wrong]
        ways = [f"use --gpus {_listed(fits)}"] if len(fits) > 1 else []
        ways += ["choose another --axis, or --weak or --strong alone, or change the field"]
        raise ConfigError(first.field, first.value, first.rule, ", or ".join(ways))
    order = {pair: place for place, pair in enumerate(named)}
    return sorted(made, key=lambda point: order[point.axis, point.mode])


def _of_point(error: ConfigError, axis: str, mode: str, devices: int) -> ConfigError:
    """Return a point's error, which says which point it is of."""
    where = f"on {count_of(devices)}, {mode} scaling over {axis}: "
    return ConfigError(error.field, error.value, where + error.rule, error.fix)


def _point(cfg: Config, axis: str, mode: str, devices: int, fewest: int) -> ScalingPoint:
    """Return a point.

    Weak scaling over the pipeline also needs more microbatches: their size stays the same.

    Raises:   ConfigError if the devices, the batch or a field of the model cannot be divided so.
    """
    rest, batch = others(cfg, axis), cfg.train.global_batch_size
    if devices % rest:
        rule = f"must be divisible by {rest}, the product of the config's axes except {axis}"
        raise ConfigError("--gpus", devices, rule, "use multiples")
    wanted = {
        "parallel.data": max(cfg.parallel.data, 1),
        f"parallel.{axis}": devices // rest,
    }
    if mode == "weak":
        if batch * devices % fewest:
            rule = f"times {devices}/{fewest} is not a whole number of sequences"
            raise ConfigError("train.global_batch_size", batch, rule, "")
        wanted["train.global_batch_size"] = batch * devices // fewest
        count = cfg.parallel.num_microbatches
        if axis == PIPELINE and not cfg.train.micro_batch_size:
            wanted["parallel.num_microbatches"] = max(count * devices // fewest, 1)
    if cfg.run.cpu_devices:
        wanted["run.cpu_devices"] = devices
    # Without fields that do not change, points of several axes are often the same measurement.
    always = f"parallel.{DATA}", "run.cpu_devices"
    changed = {p: v for p, v in wanted.items() if p in always or v != value_of(cfg, p)}
    resolve(replace(cfg, **changed), devices)
    return ScalingPoint(axis, mode, devices, tuple(changed.items()))
