"""The place of a process in its run."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.config import ConfigError, flag
from jaxpar.config.numerals import only_digits

type Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """The place of a process in its run."""

    source: str
    """Where the place was read from."""
    coordinator: str
    """host:port on which process 0 listens. Empty if the source does not name the host."""
    num_processes: int
    process_id: int
    num_hosts: int | None = None
    """None if the source does not specify it."""
    local_processes: int = 1
    """Processes on this host that share its visible GPUs; 1 if each sees only its own GPUs, or if
    the source does not specify it."""
    local_id: int = 0
    """Index of this process among them."""
    bound: bool = False
    """The launcher shows each process only its own GPUs."""
    started: bool = False
    """A launcher that can run within another one started this process. Otherwise the variables may
    have been set by hand."""
    serves: bool = True
    """Process 0 runs the coordinator. Otherwise its launcher does."""
    passed_over: str = ""
    """Sources that were incomplete."""

    def __str__(self) -> str:
        place = f"process {self.process_id} of {self.num_processes}"
        return f"{self.source}: {place}, coordinator {self.coordinator or 'unknown'}"

    @property
    def host(self) -> str:
        """The coordinator's host."""
        return self.coordinator.rpartition(":")[0].strip("[]")


class NotANumber(ConfigError):
    """A variable of a launcher has another value than a launcher sets."""


def all_of(env: Environment, source: str, names: tuple[str, ...]) -> list[str] | None:
    """Return the variables' values; None if none is set.

    Raises:   ConfigError if only some are set.
    """
    missing = [name for name in names if not env.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        there = " ".join(f"{name}={env[name]}" for name in names if name not in missing)
        rule = f"is incomplete for {source}: {', '.join(missing)} not set"
        fix = f"set all, or run a single process with {flag('cluster.detect', 'none')}"
        raise ConfigError("environment", there, rule, fix)
    return [env[name] for name in names]


def number(env: Environment, name: str, default: int | None = None, least: int = 0) -> int:
    """Return a variable as a number; torch's range of one, such as 2:2, is also a number.

    Raises:   NotANumber if it is not a number, or below the minimum.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    low, _, high = (text or "").partition(":")
    if not only_digits(low) or len(low) > 9 or high not in ("", low):
        raise NotANumber(name, text, "is not an integer", "check what sets it")
    if int(low) < least:
        raise NotANumber(name, text, f"must be at least {least}", "check what sets it")
    return int(low)
