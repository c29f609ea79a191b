"""Answers other questions: the fewest GPUs, the largest batch, the KV cache, time and cost."""

import dataclasses
import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.config import Config, ConfigError
from jaxpar.config.layout.layer_kinds import of_masks
from jaxpar.config.lists.step_sizes import step_sizes, without_schedules
from jaxpar.model.decode import cache_bytes
from jaxpar.model.flops import num_params
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.progress import Watch, no_report
from jaxpar.planning.ranking import Layout, make_plan
from jaxpar.planning.whole_run import parts_of

HOUR = 3600.0

#: Highest price of a GPU-hour, in any currency. The cost of any number of tokens is then finite.
MAX_PRICE = 1e9


def counts_of_gpus(per_host: int, most: int) -> list[int]:
    """Return typical numbers of GPUs: powers of two within a host, then multiples of hosts."""
    inside = [2**i for i in range(per_host.bit_length()) if 2**i <= per_host]
    hosts, count = [], 2
    while count * per_host <= most:
        hosts.append(count * per_host)
        count += max(1, 2 ** (count.bit_length() - 2))
    return [n for n in inside if n <= most] + hosts


def fewest_gpus(
    cfg: Config, cluster: Cluster, most: int = 4096, watch: Watch = no_report
) -> tuple[int, Layout]:
    """Return the fewest GPUs on which a layout fits, and the fastest layout there.

    Args:     watch: as in `make_plan`.
    Raises:   ConfigError if no layout fits `most` GPUs.
    """
    for count in counts_of_gpus(cluster.per_host, most):
        there = dataclasses.replace(cluster, num_gpus=count)
        plan = make_plan(cfg, there, coarse=True, watch=watch)
        if plan.fitting:
            return count, plan.fitting[0]
    rule = f"does not fit {most} x {cluster.gpu.name} under any layout"
    fix = "use a GPU with more memory"
    raise ConfigError("model", f"{num_params(cfg.model):,} parameters", rule, fix)


def with_batch(cfg: Config, rows: int) -> Config:
    """Return the config with this global batch size and one microbatch."""
    cfg = without_schedules(cfg)
    train = dataclasses.replace(cfg.train, global_batch_size=rows)
    parallel = dataclasses.replace(cfg.parallel, num_microbatches=1)
    return dataclasses.replace(cfg, train=train, parallel=parallel)


def with_length(cfg: Config, length: int) -> Config:
    """Return the config with sequences of `length` and about the same tokens per step."""
    tokens = cfg.train.global_batch_size * cfg.data.seq_len
    data = dataclasses.replace(cfg.data, seq_len=length)
    return with_batch(dataclasses.replace(cfg, data=data), max(tokens // length, 1))


def largest_batch(
    cfg: Config, cluster: Cluster, watch: Watch = no_report
) -> tuple[int, Layout] | None:
    """Return the largest global batch that fits in one microbatch; None if none fits.

    The candidates are powers of two times the odd part of the number of GPUs, so that the data axes
    divide them. More microbatches allow any larger batch.
    """
    fixed = {"num_microbatches": 1, "pipeline": 1}
    odd = cluster.num_gpus // (cluster.num_gpus & -cluster.num_gpus)
    return _largest(lambda n: (with_batch(cfg, n), fixed), odd, cluster, watch)


def longest_sequence(
    cfg: Config, cluster: Cluster, watch: Watch = no_report
) -> tuple[int, Layout] | None:
    """Return the longest sequence that fits, at about the same tokens per step.

    The candidates double the configured length.
    """
    return _largest(lambda n: (with_length(cfg, n), {}), cfg.data.seq_len, cluster, watch)


def _largest(case, start: int, cluster: Cluster, watch: Watch) -> tuple[int, Layout] | None:
    best, n = None, start
    while n <= 2**24:
        cfg, fixed = case(n)
        plan = make_plan(cfg, cluster, fixed, coarse=True, watch=watch)
        if plan.fitting:
            best = (n, plan.fitting[0])
        elif best is not None or plan.too_large:
            break
        n *= 2
    return best


def check_price(option: str, price: float | None, tokens: float | None) -> None:
    """Raises:   ConfigError for a price that is not usable, or that has no tokens to pay for."""
    if price is None:
        return
    if not 0 < price <= MAX_PRICE:
        rule = f"must be above 0, and at most {MAX_PRICE:g}"
        raise ConfigError(option, price, rule, f"use {option} 2.5")
    if tokens is None:
        rule, fix = "requires --tokens, which is not given", "add --tokens 15e12"
        raise ConfigError(option, price, rule, fix)


@dataclass(frozen=True)
class TrainingCost:
    """The time and cost of training on `tokens` tokens.

    price, spot_price   cost on demand, and on spot GPUs without any interruption; None if the price
                        of a GPU-hour is unknown.
    break_even          share of the time on spot GPUs that interruptions may waste until they cost
                        as much as GPUs on demand; None unless both are known and spot is cheaper.
    """

    tokens: float
    steps: int
    seconds: float
    gpu_hours: float
    price: float | None
    spot_price: float | None
    break_even: float | None


def cost_of(
    layout: Layout,
    cluster: Cluster,
    tokens: float,
    price: float | None = None,
    spot_price: float | None = None,
) -> TrainingCost:
    """Return the time and GPU-hours at the predicted rate, and the cost if prices are given.

    Evaluation, checkpoints, failures and interruptions are not included.

    Args:     price, spot_price: of a GPU-hour, on demand and on spot.
    """
    seconds, sizes = tokens / (layout.time.rate * cluster.num_gpus), step_sizes(layout.cfg)
    steps = sizes.steps_of(math.ceil(tokens))
    if len(sizes.sizes) > 1:
        seconds = sum(part.seconds for part in parts_of(layout, cluster, steps))
    hours = seconds / HOUR * cluster.num_gpus
    on_demand, on_spot = (None if p is None else hours * p for p in (price, spot_price))
    spare = None
    if price is not None and spot_price is not None and spot_price < price:
        spare = 1 - spot_price / price
    return TrainingCost(tokens, steps, seconds, hours, on_demand, on_spot, spare)


@dataclass(frozen=True)
class Inference:
    """Memory for generation on one GPU, for one size of the tensor axis.

    weights, cache   bytes. rows   sequences that fit in addition to the weights.
    """

    tensor: int
    weights: float
    cache: float
    rows: int


def inference_memory(cfg: Config, cluster: Cluster, rows: int, slots: int) -> list[Inference]:
    """Return the memory for generation at each tensor size that the model allows in a host.

    Args:     rows, slots: the KV cache holds `rows` sequences of `slots` tokens.
    """
    m = cfg.model
    width = jnp.dtype(m.dtype).itemsize
    found = []
    for tensor in (t for t in (1, 2, 4, 8, 16) if t <= min(cluster.per_host, cluster.num_gpus)):
        kv_heads = (one.num_kv_heads for one in of_masks(m))
        if any(n % tensor for n in kv_heads) or m.d_ff % tensor or m.vocab_size % tensor:
            continue
        weights = width * num_params(m) / tensor
        each = cache_bytes(m, 1, slots, tensor)
        room = max(cluster.gpu.usable_bytes - weights, 0)
        cache = cache_bytes(m, rows, slots, tensor)
        found.append(Inference(tensor, weights, cache, int(room // each)))
    return found
