"""Simulates a run under the failures of many seeds: means, their errors, and the best intervals."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxpar.goodput.failures import Rates, failures
from jaxpar.goodput.recovery import Policy, Saves
from jaxpar.goodput.run import Outcome, Simulation

#: Steps between saves that are tried: from 1 to 10,000, each about a third more than the last.
TRIED = tuple(sorted({round(10 ** (i / 8)) for i in range(33)}))

#: Called with the number of simulated runs and what they are.
type Watch = Callable[[int, str], None]


@dataclass(frozen=True)
class Scene:
    """What is simulated, apart from the policy."""

    hosts: int
    gpus_per_host: int
    rates: Rates
    seconds: float
    """Of a run."""
    seeds: Sequence[int]


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and half of the width of its 95% confidence interval."""

    value: float
    error: float


@dataclass(frozen=True)
class Result:
    """Runs of one policy, one for each seed."""

    policy: Policy
    outcomes: tuple[Outcome, ...]

    @property
    def goodput(self) -> Mean:
        """The share of the time that went into steps that count."""
        return mean([one.goodput for one in self.outcomes])

    def share(self, part: str) -> float:
        """Return the mean share of the time of one of `PARTS`."""
        return mean([one.seconds[part] / one.total for one in self.outcomes]).value


def mean(values: Sequence[float]) -> Mean:
    """Return the mean of independent values, with its error by Student's t."""
    from scipy.special import stdtrit

    n = len(values)
    middle = math.fsum(values) / n
    if n == 1:
        return Mean(middle, math.inf)
    variance = math.fsum((value - middle) ** 2 for value in values) / (n - 1)
    return Mean(middle, float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n))


def simulate(policy: Policy, scene: Scene) -> Result:
    """Simulate a policy under the failures of every seed."""

    def one(seed: int) -> Outcome:
        stream = failures(scene.rates, scene.hosts, scene.gpus_per_host, seed)
        return Simulation(policy, scene.hosts, stream, scene.seconds).run()

    return Result(policy, tuple(map(one, scene.seeds)))


def with_intervals(policy: Policy, disk: int, memory: int) -> Policy:
    """Return the policy with other steps between saves."""
    every = lambda saves, steps: dataclasses.replace(saves, every=steps)  # noqa: E731
    return dataclasses.replace(
        policy, disk=every(policy.disk, disk), memory=every(policy.memory, memory)
    )


def over_intervals(
    policy: Policy, scene: Scene, steps: Iterable[int], of: str, watch: Watch
) -> list[Result]:
    """Simulate the policy with other steps between saves, under the same failures.

    Args:     of: disk or memory: the saves that change.
    """
    found = []
    for n in steps:
        disk, memory = (n, policy.memory.every) if of == "disk" else (policy.disk.every, n)
        found.append(simulate(with_intervals(policy, disk, memory), scene))
        watch(len(found) * len(scene.seeds), f"runs with other intervals ({of}) simulated")
    return found


def best(results: Iterable[Result]) -> Result:
    """Return the result with the highest mean goodput."""
    return max(results, key=lambda result: result.goodput.value)


def best_intervals(policy: Policy, scene: Scene, watch: Watch) -> Result:
    """Search the steps between saves, to memory and to disk in turn, until neither changes.

    The goodput has one maximum along each, so few of `TRIED` are simulated, then the neighbors of
    the best of these.
    """
    result = simulate(policy, scene)
    for _ in range(3):
        before = result.policy
        for of in ("memory", "disk"):
            saves: Saves = getattr(result.policy, of)
            if not saves.every:
                continue
            useful = _useful(policy, saves)
            coarse = over_intervals(result.policy, scene, useful[::4], of, watch)
            at = useful.index(getattr(best(coarse).policy, of).every)
            near = [n for n in useful[max(at - 3, 0) : at + 4] if n != useful[at]]
            fine = over_intervals(result.policy, scene, near, of, watch)
            result = best([result, *coarse, *fine])
        if result.policy == before:
            break
    return result


def _useful(policy: Policy, saves: Saves) -> list[int]:
    """Return the steps to try: those in which a save can be complete."""
    fewest = saves.seconds / policy.step
    return [n for n in TRIED if n >= fewest] or [math.ceil(fewest)]
