"""Adapts a run to the number of devices: when it resumes, or under `parallel.auto`.

The global batch and the order of the data do not change. `choose_layout` lets the planner choose
the mesh for the available devices. `same_rows` keeps microbatches from growing: fewer devices
accumulate over more microbatches, so none needs more memory.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import jax

from jaxpar.checkpoint.saved import Saved
from jaxpar.config import Config, ConfigError, flag, value_of
from jaxpar.config.layout.fields import ALL, FIELDS, fixed_layout_fields
from jaxpar.config.listed import written
from jaxpar.config.lists.step_sizes import BATCHES, schedule_of
from jaxpar.config.resolve import fill_data_axis
from jaxpar.config.serialize import field_from_values
from jaxpar.config.values import to_values
from jaxpar.prediction.hardware import GIB, H200, NETWORKS, Gpu, HardwareFigure, gpu_of_kind
from jaxpar.runtime.host_memory import host_memory
from jaxpar.runtime.processes import peers

if TYPE_CHECKING:
    from jaxpar.prediction.communication import Cluster
    from jaxpar.prediction.ranking import Layout

#: The field that adapts to the number of devices when a run resumes.
MICROBATCHES = "parallel.num_microbatches"

#: The field that is 1 on devices that share no weights.
ZERO = "parallel.zero"

#: Axes that split the rows of a batch, and axes that split each row.
ROWS, CUTS = ("replica", "data", "expert"), ("sequence", "tensor")


# ------------------------------------------------------------------------- chosen by the planner


def choose_layout(cfg: Config, seconds: float) -> Config:
    """Return the config with the fastest layout for these devices, if `parallel.auto` is set.

    Process 0 plans and logs its choice; the others use its result.

    Args:     seconds: how long to wait for the other processes.
    Returns:  a config with `parallel.auto` empty, which names the layout.
    Raises:   ConfigError when no layout fits; PeerFailed in the other processes.
    """
    if not cfg.parallel.auto:
        return cfg
    from jaxpar.prediction.layouts import with_parallel

    jax.devices()  # JAX starts in all processes together, or not at all

    chosen = json.loads(peers.of_first("layout", lambda: json.dumps(_best(cfg)), seconds))
    peers.log(f"layout     {chosen['reason']}")
    fields = {n: field_from_values(f"parallel.{n}", v) for n, v in chosen["fields"].items()}
    return with_parallel(cfg, auto=(), **fields)


def _best(cfg: Config) -> dict[str, Any]:
    """Return the fields of the fastest layout that fits these devices, and the reason in words."""
    from jaxpar.prediction.communication import Cluster
    from jaxpar.prediction.ranking import make_plan, nothing_fits

    here = Cluster(gpu_here(), NETWORKS["ib400"], jax.device_count(), jax.local_device_count())
    fixed = fixed_layout_fields(cfg)
    plan = make_plan(cfg, here, fixed, coarse=True)
    if not plan.fitting:
        error = nothing_fits(plan)
        fix = f"use more devices, a smaller model, or less in {flag('parallel.auto')}"
        value = f"{here.num_gpus} x {here.gpu.name}"
        raise ConfigError("parallel.auto", value, error.rule, fix)
    first = plan.fitting[0]
    fields = {name: to_values(getattr(first.cfg.parallel, name)) for name in FIELDS}
    return {"fields": fields, "reason": _reason(first, plan.fitting, here, fixed)}


def _reason(
    first: "Layout", fitting: "list[Layout]", here: "Cluster", fixed: dict[str, Any]
) -> str:
    """Describe the choice: the devices, how many layouts fit, the lead over the next mesh."""
    from jaxpar.prediction.layouts import describe

    p = first.cfg.parallel
    words = describe(first.cfg).replace("one GPU", "one device")
    text = (
        f"{words}, zero {p.zero}, remat {written(p.remat)}, microbatches {p.num_microbatches}: the "
    )
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
    """Return the planner's data of this process's devices.

    A device that the planner does not know is planned as an H200 with its own memory: good enough
    for experiments, but its times are an H200's. Simulated devices share the host's memory.
    """
    device = jax.local_devices()[0]
    known = gpu_of_kind(device.device_kind)
    if known is not None:
        return known
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    memory = limit or host_memory() / (jax.local_device_count() * peers.processes_here())
    name = f"{device.device_kind} (planned as {H200.name})"
    return dataclasses.replace(H200, name=name, memory=HardwareFigure(memory, "this device"))


# --------------------------------------------------------------------- accumulation that follows


def same_rows(cfg: Config, saved: Saved | None, num_devices: int) -> Config:
    """Return the config with enough microbatches that no device holds more of one than before.

    Changes nothing in a new run, or if the command sets another number of microbatches than before
    or their size.

    Args:     saved: the checkpoint to resume from, None for a new run.
    Raises:   ConfigError when the devices cannot divide the rows of the global batch, which does
              not change when a run resumes.
    """
    batch = cfg.train.global_batch_size
    if saved is None or saved.config["train"]["global_batch_size"] != batch:
        return cfg  # `checkpoint.check_resumable` refuses another global batch
    if cfg.train.micro_batch_size or cfg.parallel.num_microbatches != asked_before(saved):
        return cfg
    from jaxpar.prediction.layouts import divisors, with_parallel

    then, now = saved.config["parallel"], vars(fill_data_axis(cfg, num_devices).parallel)
    shared = math.gcd(*(size for _, size in schedule_of(cfg, BATCHES)))
    for path, divided in (("train.global_batch_size", batch), (BATCHES, shared)):
        if divided % _product(now, ROWS):
            rule = f"is that of {saved}, and {num_devices} devices cannot divide its rows "
            rule += f"{_product(now, ROWS)} ways"
            fix = f"use {flag('parallel.auto', (ALL,))}, or axes that divide them fewer ways: "
            raise ConfigError(path, value_of(cfg, path), rule, fix + flag("parallel.tensor", 2))
    rows = batch // _product(now, ROWS)
    # A device's share of a microbatch, in tokens: before, and now with n microbatches.
    before = Fraction(batch, _product(then, (*ROWS, "num_microbatches", *CUTS)))
    part = lambda n: Fraction(rows, n * _product(now, CUTS))  # noqa: E731
    fits = [n for n in divisors(rows) if part(n) <= before and rows // n % now["row_groups"] == 0]
    fits = [n for n in fits if shared % (batch // n) == 0]
    if now["virtual_stages"] > 1:
        fits = [n for n in fits if n % now["pipeline"] == 0]
    if not fits or part(fits[0]) == part(cfg.parallel.num_microbatches):
        return cfg
    peers.log(
        f"changed    {MICROBATCHES}: {fits[0]}, not {cfg.parallel.num_microbatches}, so that none "
        f"is larger on {num_devices} devices than before; the global batch is the same"
    )
    return with_parallel(cfg, num_microbatches=fits[0])


def _product(parallel: Mapping[str, Any], names: Iterable[str]) -> int:
    """Multiply fields of `parallel`. A field that the writing version did not have counts as 1."""
    return math.prod(parallel.get(name, 1) for name in names)


def asked_before(saved: Saved) -> int:
    """Return the number of microbatches that the command of the saved run set."""
    used = saved.config["parallel"].get("num_microbatches", 1)
    return int(saved.asked.get(MICROBATCHES, used))


def changed_by_layout(asked: Config, used: Config) -> dict[str, Any]:
    """Return the fields that the command set, and that the run changed for its devices; for the
    checkpoint and for starts from the run's folder, perhaps on other devices."""
    pairs = {path: (value_of(asked, path), value_of(used, path)) for path in (MICROBATCHES, ZERO)}
    return {path: value for path, (value, other) in pairs.items() if value != other}
