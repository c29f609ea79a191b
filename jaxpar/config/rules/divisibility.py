"""Divisibility rules, in one table."""

import math
from typing import NamedTuple

from jaxpar.config import Config, flag, require, value_of
from jaxpar.config.layout.placement import in_zigzag_order

#: What cuBLAS requires of each dim of a float8 matmul, on a device.
FLOAT8 = 16


class _Division(NamedTuple):
    """`path` must be divisible by the product of the fields `by`, times `times`."""

    path: str
    by: tuple[str, ...]
    why: str
    times: int = 1

    def divisor(self, cfg: Config) -> int:
        """Return the product. `parallel.data` is included once it is known."""
        return self.times * math.prod(max(value_of(cfg, path), 1) for path in self.by)


def _divisions(cfg: Config) -> list[_Division]:
    """Return the conditions beside those of the model's components (`rules/components.py`)."""
    p, tensor, pipeline = cfg.parallel, "parallel.tensor", "parallel.pipeline"
    sequence, data, expert = "parallel.sequence", "parallel.data", "parallel.expert"
    rows = ("parallel.replica", data, expert, "parallel.num_microbatches", "parallel.row_groups")
    zigzag = p.sequence > 1 and in_zigzag_order(cfg)
    halves = "in zigzag order, each half of a shard" if zigzag else "each shard of a sequence"
    table = [
        _Division("model.vocab_size", (tensor, pipeline), "vocabulary shards have equal sizes"),
        _Division("data.seq_len", (sequence, tensor), f"{halves} has the same length", 1 + zigzag),
        _Division("model.d_model", (data, expert, sequence), "parameters are sharded over it"),
        _Division("train.global_batch_size", rows, "microbatches have equal numbers of rows"),
    ]
    if cfg.model.max_positions:
        why = "the table of positions is split like the vocabulary"
        table.append(_Division("model.max_positions", (tensor, pipeline), why))
    if cfg.compute.matmul_dtype == "float8":
        # One dim is the tokens of a device, or of one tensor rank in a collective matmul.
        why = f"float8 matmuls need dimensions divisible by {FLOAT8} per device"
        table.append(_Division("model.d_model", (), why, FLOAT8))
        table.append(_Division("data.seq_len", (sequence, tensor), why, FLOAT8))
    if p.virtual_stages > 1:
        why = "interleaved stages work in whole rounds"
        table.append(_Division("parallel.num_microbatches", (pipeline,), why))
    return table


def divisibility(cfg: Config) -> None:
    """Check every row of the table."""
    table = _divisions(cfg)
    for rule in table:
        value, divisor = value_of(cfg, rule.path), rule.divisor(cfg)
        if value % divisor == 0:
            continue
        whole = math.lcm(*(other.divisor(cfg) for other in table if other.path == rule.path))
        factors = [path for path in rule.by if value_of(cfg, path) > 1]
        ways = [flag(rule.path, -(-value // whole) * whole)]
        if rule.path == "model.d_model" and factors:
            ways = _more_replicas(cfg) or ways
        elif rule.times == 1 and len(factors) == 1 and factors != ["parallel.data"]:
            other = flag(factors[0], largest_divisor(value, divisor))
            # Heads and widths belong to the model: the mesh comes first.
            of_mesh = rule.path.startswith("model.") and factors[0].startswith("parallel.")
            ways = [other, *ways] if of_mesh else [*ways, other]
        product = " * ".join(([str(rule.times)] if rule.times > 1 else []) + factors)
        product += f" = {divisor}" if factors else ""
        why = f"must be divisible by {product}, since {rule.why}"
        require(False, cfg, rule.path, why, *ways)


def _more_replicas(cfg: Config) -> list[str]:
    """A fix for `d_model`: the same devices, with parameters sharded over fewer of them."""
    p = cfg.parallel
    fits = [n for n in range(1, p.data) if p.data % n == 0]
    fits = [n for n in fits if cfg.model.d_model % (n * p.expert * p.sequence) == 0]
    if not fits:
        return []
    replicas = p.replica * p.data // fits[-1]
    return [f"{flag('parallel.data', fits[-1])} {flag('parallel.replica', replicas)}"]


def largest_divisor(value: int, at_most: int) -> int:
    """Return the largest divisor of `value` that is at most `at_most`."""
    return max(n for n in range(1, at_most + 1) if value % n == 0)
