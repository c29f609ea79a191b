"""Another number of devices than before, or than the config was written for: what a run then does.

The global batch stays, and with it the order of the data. `choose_layout` has the planner set the
mesh for the devices that are there; `same_rows` keeps a microbatch from growing: fewer devices
accumulate over more of them, and need no more memory for each.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import jax

from jaxpar.checkpoint import Saved
from jaxpar.config import Config, ConfigError, flag
from jaxpar.config.layout_fields import FIELDS, fixed_layout_fields
from jaxpar.config.resolve import fill_data_axis
from jaxpar.planning.layouts import describe, divisors, with_parallel
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.predict.hardware import GIB, H200, NETWORKS, Gpu, HardwareFigure, gpu_of_kind
from jaxpar.planning.ranking import Layout, make_plan, nothing_fits
from jaxpar.runtime import start as runtime
from jaxpar.runtime.processes import peers

#: The field whose value follows the devices when a run goes on.
MICROBATCHES = "parallel.num_microbatches"

#: Axes over which the rows of a batch are split, and those that cut what is held of a row.
ROWS, CUTS = ("replica", "data", "expert"), ("sequence", "tensor")


# ------------------------------------------------------------------------- chosen by the planner


def choose_layout(cfg: Config, seconds: float) -> Config:
    """The config with the layout that the planner finds fastest here, if `parallel.auto` asks.

    Process 0 plans and says what it chose; the others take the same.

    Args:     seconds: to wait for the other processes.
    Returns:  a config with `parallel.auto` empty: it names the layout that is used.
    Raises:   ConfigError when no layout fits; PeerFailed in the other processes.
    """
    if not cfg.parallel.auto:
        return cfg
    jax.devices()  # JAX starts in all processes together, or not at all

    def plan() -> str:
        return json.dumps(_best(cfg)) if peers.rank() == 0 else ""

    own = peers.all_or_none("layout", seconds, plan)
    chosen = json.loads(peers.exchange("chosen layout", own, seconds)[0])
    peers.log(f"layout     {chosen['reason']}")
    return with_parallel(cfg, auto="", **chosen["fields"])


def _best(cfg: Config) -> dict[str, Any]:
    """Fields of the first of the layouts that fit these devices, and the reason in words."""
    here = Cluster(gpu_here(), NETWORKS["ib400"], jax.device_count(), jax.local_device_count())
    fixed = fixed_layout_fields(cfg)
    plan = make_plan(cfg, here, fixed, coarse=True)
    if not plan.fitting:
        error = nothing_fits(plan)
        fix = f"use more devices, a smaller model, or less in {flag('parallel.auto')}"
        value = f"{here.num_gpus} x {here.gpu.name}"
        raise ConfigError("parallel.auto", value, error.rule, fix)
    first = plan.fitting[0]
    fields = {name: getattr(first.cfg.parallel, name) for name in FIELDS}
    return {"fields": fields, "reason": _reason(first, plan.fitting, here, fixed)}


def _reason(first: Layout, fitting: list[Layout], here: Cluster, fixed: dict[str, Any]) -> str:
    """Why this layout: on what, of how many, how far ahead of the next mesh."""
    p = first.cfg.parallel
    words = describe(first.cfg).replace("one GPU", "one device")
    text = f"{words}, zero {p.zero}, remat {p.remat}, microbatches {p.num_microbatches}: the "
    text += f"fastest of {len(fitting):,} that fit {here.num_gpus} x {here.gpu.name}, "
    text += f"{first.memory.total / GIB:.1f} GiB each"
    other = next((one for one in fitting if describe(one.cfg) != describe(first.cfg)), None)
    if other is not None:
        ahead = first.time.rate / other.time.rate - 1
        text += f"; {ahead:.1%} ahead of {describe(other.cfg)}"
    if fixed:
        text += f"; kept: {', '.join(f'{name} {value}' for name, value in fixed.items())}"
    return text


def gpu_here() -> Gpu:
    """This process's devices as the planner knows them; others as an H200 with their own memory.

    Simulated devices share the host's memory. What such a stand-in ranks is for trying things out:
    its times are an H200's.
    """
    device = jax.local_devices()[0]
    known = gpu_of_kind(device.device_kind)
    if known is not None:
        return known
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    memory = limit or runtime.host_memory() / jax.local_device_count()
    name = f"{device.device_kind} (planned as {H200.name})"
    return dataclasses.replace(H200, name=name, memory=HardwareFigure(memory, "this device"))


# --------------------------------------------------------------------- accumulation that follows


def same_rows(cfg: Config, saved: Saved | None, num_devices: int) -> Config:
    """The config with as many microbatches as keep a device's part of each from growing.

    Only where a run goes on, and the command asks for no other number of microbatches than before.

    Args:     saved: what the run goes on from, None for a new one.
    Raises:   ConfigError when the devices cannot share the rows of the global batch, which a run
              that goes on keeps.
    """
    batch = cfg.train.global_batch_size
    if saved is None or saved.config["train"]["global_batch_size"] != batch:
        return cfg  # another batch is refused, by name
    if cfg.parallel.num_microbatches != asked_before(saved):
        return cfg
    then, now = saved.config["parallel"], vars(fill_data_axis(cfg, num_devices).parallel)
    if batch % _product(now, ROWS):
        rule = f"is that of {saved}, and {num_devices} devices cannot share its rows "
        rule += f"{_product(now, ROWS)} ways"
        fix = f"use {flag('parallel.auto', 'all')}, or axes that leave fewer ways: "
        path = "train.global_batch_size"
        raise ConfigError(path, batch, rule, fix + flag("parallel.tensor", 2))
    rows = batch // _product(now, ROWS)
    # What a device holds of a microbatch, in tokens: then, and now with n of them.
    before = Fraction(batch, _product(then, (*ROWS, "num_microbatches", *CUTS)))
    part = lambda n: Fraction(rows, n * _product(now, CUTS))  # noqa: E731
    fits = [n for n in divisors(rows) if part(n) <= before and rows // n % now["row_groups"] == 0]
    if now["virtual_stages"] > 1:
        fits = [n for n in fits if n % now["pipeline"] == 0]
    if not fits or part(fits[0]) == part(cfg.parallel.num_microbatches):
        return cfg
    peers.log(
        f"changed    {MICROBATCHES}: {fits[0]}, not {cfg.parallel.num_microbatches}, so that each "
        f"is no larger on {num_devices} devices than before; the global batch is the same"
    )
    return with_parallel(cfg, num_microbatches=fits[0])


def _product(parallel: Mapping[str, Any], names: Iterable[str]) -> int:
    """Of fields of `parallel`, also as an earlier version saved them."""
    return math.prod(parallel.get(name, 1) for name in names)


def asked_before(saved: Saved) -> int:
    """The microbatches that the command asked for, of the run that has saved this."""
    used = saved.config["parallel"].get("num_microbatches", 1)
    return int(saved.asked.get(MICROBATCHES, used))


def changed_by_layout(asked: Config, used: Config) -> dict[str, Any]:
    """What a checkpoint is to know of the command, where the run does something else."""
    value = asked.parallel.num_microbatches
    return {} if value == used.parallel.num_microbatches else {MICROBATCHES: value}
