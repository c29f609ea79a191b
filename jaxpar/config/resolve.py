"""Fill in the config fields that depend on the number of devices."""

import dataclasses
import math

from jaxpar.config import Config, flag, require, value_of
from jaxpar.config.lists.step_sizes import step_sizes
from jaxpar.config.rules.divisibility import largest_divisor
from jaxpar.config.rules.limits import MAX_INT

#: All axes except data.
_OTHER_AXES = tuple(
    f"parallel.{axis}" for axis in "pipeline replica expert sequence tensor".split()
)


def fill_batch(cfg: Config) -> Config:
    """Set `train.global_batch_size` for `train.global_batch_tokens`, in place of it.

    Raises:   ConfigError if the tokens are not whole sequences.
    """
    path, t, length = "train.global_batch_tokens", cfg.train, cfg.data.seq_len
    if t.global_batch_tokens <= 0 or length <= 0:  # the rules of numbers report these
        return cfg
    rows, rest = divmod(t.global_batch_tokens, length)
    rule = f"must be a multiple of data.seq_len = {length}"
    nearest = max(round(t.global_batch_tokens / length), 1) * length
    require(rest == 0, cfg, path, rule, flag(path, nearest))
    filled = dataclasses.replace(t, global_batch_size=rows, global_batch_tokens=0)
    return dataclasses.replace(cfg, train=filled)


def fill_steps(cfg: Config) -> Config:
    """Set `train.num_steps` to the fewest with `train.num_tokens` tokens, if that is set.

    With `train.num_epochs`, it is unknown before the data is open (`data/loader.py`): no limit.

    Raises:   ConfigError if these are too many steps.
    """
    if cfg.train.num_epochs > 0:
        return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, num_steps=MAX_INT))
    t, each = cfg.train, cfg.train.global_batch_size * cfg.data.seq_len
    if t.num_tokens <= 0 or each <= 0:  # the rules of numbers report the latter
        return cfg
    steps, path = step_sizes(cfg).steps_of(t.num_tokens), "train.num_tokens"
    rule = f"is {steps} steps of {each} tokens, more than {MAX_INT}"
    require(steps <= MAX_INT, cfg, path, rule, flag(path, MAX_INT * each))
    return dataclasses.replace(cfg, train=dataclasses.replace(t, num_steps=steps))


def cast_once(cfg: Config) -> Config:
    """Set ZeRO-1 if weights are not sharded, since there is nothing to gather layer by layer.

    Weights are then cast once per step, and matmuls accumulate the gradients of microbatches.
    Configs with float8 gathers are unchanged, since the gathers round the weights.
    """
    p = cfg.parallel
    if p.data * p.expert * p.sequence > 1 or p.gather_dtype != "compute":
        return cfg
    return dataclasses.replace(cfg, parallel=dataclasses.replace(p, zero=1))


def fill_deterministic(cfg: Config) -> Config:
    """Set `compute.attention_deterministic` if `run.deterministic` is set."""
    if not cfg.run.deterministic:
        return cfg
    compute = dataclasses.replace(cfg.compute, attention_deterministic=True)
    return dataclasses.replace(cfg, compute=compute)


def fill_microbatches(cfg: Config) -> Config:
    """Return the config with `parallel.num_microbatches` from `train.micro_batch_size`, if set.

    Args:     cfg: with `parallel.data` filled in.
    Raises:   ConfigError if microbatches of that size do not divide a shard of the global batch, or
              if the config also sets another number of microbatches.
    """
    size, p, batch = cfg.train.micro_batch_size, cfg.parallel, cfg.train.global_batch_size
    shards = p.replica * p.data * p.expert
    if size == 0 or batch % shards:  # the rules of divisibility report the latter
        return cfg
    path, rows = "train.micro_batch_size", batch // shards
    rule = f"must divide the {rows} sequences that each of {shards} batch shards has per step"
    require(rows % size == 0, cfg, path, rule, flag(path, largest_divisor(rows, min(size, rows))))
    count = rows // size
    if p.virtual_stages > 1:
        rule = f"gives {count} microbatches, but interleaved stages work in rounds of {p.pipeline}"
        fits = [n for n in range(1, size) if rows % n == 0 and rows // n % p.pipeline == 0]
        ways = *(flag(path, n) for n in fits[-1:]), flag("parallel.virtual_stages", 1)
        require(count % p.pipeline == 0, cfg, path, rule, *ways)
    path = "parallel.num_microbatches"
    rule = f"differs from the {count} that train.micro_batch_size = {size} gives"
    ways = flag(path, count), flag("train.micro_batch_size", 0)
    require(p.num_microbatches in (1, count), cfg, path, rule, *ways)
    return dataclasses.replace(cfg, parallel=dataclasses.replace(p, num_microbatches=count))


def fill_data_axis(cfg: Config, num_devices: int) -> Config:
    """Return the config with `parallel.data` filled in.

    Raises:   ConfigError if the axes do not multiply to the number of devices.
    """
    p, smaller = cfg.parallel, _smaller_axes(cfg, num_devices)
    rest = math.prod(value_of(cfg, path) for path in _OTHER_AXES)
    fewer = [flag(path, size) for path, size in smaller.items()]
    devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
    if p.data == -1 and not smaller:
        return dataclasses.replace(cfg, parallel=dataclasses.replace(p, data=num_devices // rest))
    there = "there is" if num_devices == 1 else "there are"
    if p.data == -1:
        path, needed = next(iter(smaller)), rest
        rule = f"the axes other than data multiply to {rest}, which does not divide {devices}"
        if rest > num_devices:
            rule = f"the mesh needs {rest} devices, but {there} {devices}"
    else:
        path, needed = "parallel.data", p.data * rest
        rule = f"the mesh axes multiply to {needed}, but {there} {devices}"
        fewer.append(flag("parallel.data", -1))
    ways = [" ".join(fewer)]
    if needed > num_devices or cfg.run.cpu_devices:
        ways.append(f"{flag('run.cpu_devices', needed)} to simulate them")
    require(needed == num_devices, cfg, path, rule, *ways)
    return cfg


def _smaller_axes(cfg: Config, num_devices: int) -> dict[str, int]:
    """Return smaller sizes for axes other than `data`, so that they divide the devices."""
    smaller, left = {}, num_devices
    for path in _OTHER_AXES:
        size = value_of(cfg, path)
        fits = largest_divisor(left, size)
        left //= fits
        if fits != size:
            smaller[path] = fits
    return smaller
