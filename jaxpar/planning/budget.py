"""Answers other questions: the fewest GPUs, and the time of a number of tokens."""

import dataclasses
import math
from dataclasses import dataclass

from jaxpar.config import Config, ConfigError
from jaxpar.config.lists.step_sizes import step_sizes
from jaxpar.model.flops import num_params
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.ranking import Layout, make_plan
from jaxpar.planning.whole_run import parts_of

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
