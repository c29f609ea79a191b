"""Answers questions beside the ranking: the fewest GPUs, the time of a run, how often to save."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from jaxpar.config import Config, ConfigError
from jaxpar.config.lists.step_sizes import StepSize, config_of, step_sizes
from jaxpar.model.flops import num_params
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GIB
from jaxpar.prediction.ranking import Layout, make_plan, predict
from jaxpar.prediction.rates import EXPERT_IMBALANCE
from jaxpar.runtime.units import duration
from jaxpar.tools.planning.options import GoodputOptions

# --------------------- Answers other questions: the fewest GPUs, and the time of a number of tokens


HOUR = 3600.0


def counts_of_gpus(per_host: int, most: int) -> list[int]:
    """Return typical numbers of GPUs: powers of two within a host, then multiples of hosts."""
    inside = [2**i for i in range(per_host.bit_length()) if 2**i <= per_host]
    hosts, count = [], 2
    while count * per_host <= most:
        hosts.append(count * per_host)
        count += max(1, 2 ** (count.bit_length() - 2))
    return [n for n in inside if n <= most] + hosts


def fewest_gpus(cfg: Config, cluster: Cluster, most: int = 4096) -> tuple[int, Layout]:
    """Return the fewest GPUs on which a layout fits, and the fastest layout there.

    Raises:   ConfigError if no layout fits `most` GPUs.
    """
    for count in counts_of_gpus(cluster.per_host, most):
        there = dataclasses.replace(cluster, num_gpus=count)
        plan = make_plan(cfg, there, coarse=True)
        if plan.fitting:
            return count, plan.fitting[0]
    rule = f"does not fit {most} x {cluster.gpu.name} under any layout"
    fix = "use a GPU with more memory"
    raise ConfigError("model", f"{num_params(cfg.model):,} parameters", rule, fix)


@dataclass(frozen=True)
class TrainingCost:
    """The time of training on `tokens` tokens."""

    tokens: float
    steps: int
    seconds: float
    gpu_hours: float


def cost_of(layout: Layout, cluster: Cluster, tokens: float) -> TrainingCost:
    """Return the time and GPU-hours at the predicted rate.

    Evaluation, checkpoints, failures and interruptions are not included.
    """
    seconds, sizes = tokens / (layout.time.rate * cluster.num_gpus), step_sizes(layout.cfg)
    steps = sizes.steps_of(math.ceil(tokens))
    if len(sizes.sizes) > 1:
        seconds = sum(part.seconds for part in parts_of(layout, cluster, steps))
    return TrainingCost(tokens, steps, seconds, seconds / HOUR * cluster.num_gpus)


# -------- Predicts the whole run of a config whose steps change their size: each size, and the time


@dataclass(frozen=True)
class RunPart:
    """Steps of one size, and the prediction for one of them."""

    size: StepSize
    steps: int
    layout: Layout

    @property
    def seconds(self) -> float:
        """Predicted seconds of all of them."""
        return self.steps * self.layout.time.total


def parts_of(
    layout: Layout, cluster: Cluster, num_steps: int, imbalance: float = EXPERT_IMBALANCE
) -> list[RunPart]:
    """Predict the steps of each size in a run of `num_steps`.

    Args:     imbalance: as in `predict`.
    """
    return [
        RunPart(size, steps, predict(config_of(layout.cfg, size), cluster, imbalance))
        for size, steps in step_sizes(layout.cfg).until(num_steps)
    ]


def in_words(parts: Sequence[RunPart]) -> str:
    """Describe a run: its steps, tokens, time, and the size that needs the most memory."""
    steps, tokens = (
        sum(part.steps for part in parts),
        sum(part.steps * part.size.tokens for part in parts),
    )
    most = max(parts, key=lambda part: part.layout.memory.total)
    return (
        f"{steps:,} steps, {tokens:,} tokens, {duration(sum(part.seconds for part in parts))}; "
        f"the most memory, {most.layout.memory.total / GIB:.1f} GiB, with {most.size.rows:,} "
        f"sequences of {most.size.length:,} tokens"
    )


def record_of(parts: Sequence[RunPart]) -> list[dict[str, Any]]:
    """Return the parts for --json."""
    return [
        {
            "after_step": part.size.step,
            "global_batch_size": part.size.rows,
            "seq_len": part.size.length,
            "num_microbatches": part.layout.cfg.parallel.num_microbatches,
            "memory_bytes": part.layout.memory.total,
            "step_seconds": part.layout.time.total,
            "steps": part.steps,
            "seconds": part.seconds,
        }
        for part in parts
    ]


# ------------ Answers --goodput: how often a run should save, and the share of its time that counts
#
# The closed form of Young and Daly: failures at a constant rate, saves that training waits for.
#
# Source:   Young 1974 (A first order approximation to the optimum checkpoint interval); Daly 2006
#           (A higher order estimate of the optimum checkpoint interval for restart dumps),
#           equations 13 and 37.


def expected_goodput(interval: float, blocking: float, restart: float, between: float) -> float:
    """Return the expected share of the time that is work which counts. Exact.

    Args:     interval: seconds of work between two saves. blocking: seconds of a save. restart:
              seconds from a failure to the next step, in which further failures may come. between:
              mean seconds between failures.
    """
    try:
        segment = math.exp(restart / between) * math.expm1((interval + blocking) / between)
    except OverflowError:  # hundreds of failures in a restart
        return 0.0
    return interval / (between * segment)


def best_interval(blocking: float, between: float) -> float:
    """Return the seconds of work between two saves that waste the least.

    Young's sqrt(2 blocking between), to a higher order.
    """
    if blocking >= 2 * between:
        return between
    share = blocking / (2 * between)
    young = math.sqrt(2 * blocking * between)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - blocking


def answer_goodput(options: GoodputOptions, console: Console) -> dict[str, Any]:
    """Print the best time between saves with the expected goodput, and return the record."""
    gpus = options.gpus
    between = options.failure_hours * 3600 / gpus
    interval = best_interval(options.save_seconds, between)
    share = expected_goodput(interval, options.save_seconds, options.restart_seconds, between)
    console.print(
        f"{gpus:,} GPUs: a failure every {between / 3600:,.2f} h\n"
        f"best time between saves: {interval:,.0f} s (Daly)\n"
        f"expected goodput: {share:.1%}"
    )
    return {
        "gpus": gpus,
        "seconds_between_failures": between,
        "seconds_between_saves": interval,
        "goodput": share,
    }
