"""Ranks the layouts of a config on a cluster by predicted step time."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxpar.config import Config, ConfigError
from jaxpar.config.listed import written
from jaxpar.config.lists.step_sizes import config_of, step_sizes
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GIB
from jaxpar.prediction.kernels import attention_runs_on_reference, platform_of, with_backend
from jaxpar.prediction.layouts import describe, legal_layouts
from jaxpar.prediction.memory import MemoryForecast, memory_of
from jaxpar.prediction.rates import EXPERT_IMBALANCE
from jaxpar.prediction.time import StepTime, step_time
from jaxpar.runtime.stages import stage


@dataclass(frozen=True)
class Layout:
    """A layout and its prediction. `on_reference`: attention has no kernel on this GPU."""

    cfg: Config
    memory: MemoryForecast
    time: StepTime
    on_reference: bool = False


@dataclass
class Plan:
    """All layouts of a config on a cluster.

    fitting    layouts whose peak fits the GPU's usable memory, fastest first.
    too_large  the others, smallest first.
    refused    rule -> number of layouts that violate it; examples has an error of each.
    """

    cfg: Config
    cluster: Cluster
    fitting: list[Layout]
    too_large: list[Layout]
    refused: Counter
    examples: dict[str, ConfigError]

    @property
    def usable(self) -> float:
        """Bytes that a run may use on a GPU."""
        return self.cluster.gpu.usable_bytes

    def missing(self) -> float:
        """Return the bytes by which the smallest layout that does not fit exceeds the memory."""
        return self.too_large[0].memory.total - self.usable if self.too_large else 0.0


def predict(cfg: Config, cluster: Cluster, imbalance: float = EXPERT_IMBALANCE) -> Layout:
    """Predict one layout: the memory of the size of steps that needs most, and the time of a step
    of the largest size.

    Args:     cfg: resolved. imbalance: load of the fullest rank of an expert axis, relative to the
              mean.
    Raises:   ConfigError if `compute.attention_backend` does not support it on this GPU, or if the
              token order requires the reference implementation.
    """
    try:
        on_reference = attention_runs_on_reference(cfg, cluster.gpu)
    except ValueError as error:
        name = cfg.compute.attention_backend
        fix = "use --compute.attention-backend auto"
        rule = str(error).partition(": ")[2]
        raise ConfigError("compute.attention_backend", name, rule, fix) from error
    p = cfg.parallel
    if on_reference and p.sequence > 1 and p.context != "ulysses":
        rule = f"has no attention kernel on {cluster.gpu.name} but the reference, which stores all "
        fix = "use --parallel.context ulysses"
        raise ConfigError("parallel.context", p.context, rule + "scores", fix)
    there = with_backend(cfg, platform := platform_of(cluster.gpu))
    each = [config_of(there, size) for size in step_sizes(there).sizes]
    kernels = dict(on_reference=on_reference, softmax_by_xla=not platform.runs_elementwise_kernels)
    memory = max((memory_of(one, **kernels) for one in each), key=_total)
    return Layout(cfg, memory, step_time(there, cluster, imbalance), on_reference)


def _total(memory: MemoryForecast) -> float:
    return memory.total


def make_plan(
    cfg: Config,
    cluster: Cluster,
    fixed: dict[str, Any] | None = None,
    *,
    coarse: bool = False,
    imbalance: float = EXPERT_IMBALANCE,
) -> Plan:
    """Predict every valid layout.

    Args:     fixed: fields of `parallel` with a fixed value, by name. coarse: as in
              `legal_layouts`. imbalance: as in `predict`.
    """
    with stage("listing the layouts"):
        listing = legal_layouts(cfg, cluster.num_gpus, fixed or {}, coarse=coarse)
    layouts: list[Layout] = []
    with stage("predicting layouts") as now:
        for count, legal in enumerate(listing.configs, 1):
            now.at(f"{count:,} of {len(listing.configs):,}")
            try:
                layouts.append(predict(legal, cluster, imbalance))
            except ConfigError as error:
                listing.refuse(error)
    usable = cluster.gpu.usable_bytes
    fitting = [layout for layout in layouts if layout.memory.total <= usable]
    too_large = [layout for layout in layouts if layout.memory.total > usable]
    return Plan(
        cfg,
        cluster,
        sorted(fitting, key=lambda layout: layout.time.total),
        sorted(too_large, key=lambda layout: layout.memory.total),
        listing.refused,
        listing.examples,
    )


def nothing_fits(plan: Plan) -> ConfigError:
    """Return the error for a plan in which no layout fits: by how much, and what would help."""
    gpus, gpu = plan.cluster.num_gpus, plan.cluster.gpu
    on = f"{gpus} x {gpu.name}"
    if not plan.too_large:
        why = "the fixed axis sizes do not divide the number of GPUs"
        if plan.refused:
            (reason, _), *_ = plan.refused.most_common(1)
            first = plan.examples[reason]
            why = f"{first.field} = {first.value!r} {first.rule}"
        fix = "change that field, or use another number of GPUs"
        return ConfigError("--gpus", gpus, f"allows no valid mesh: {why}", fix)
    best = plan.too_large[0]
    short = plan.missing() / GIB
    rule = (
        f"is not enough: the smallest layout ({describe(best.cfg)}, remat "
        f"{written(best.cfg.parallel.remat)}) needs {best.memory.total / GIB:.1f} GiB on each of "
        f"{on}, "
        f"{short:.1f} GiB more than the usable {plan.usable / GIB:.1f}"
    )
    fix = "use --min-gpus to find the fewest that fit, a GPU with more memory, a smaller "
    fix += "--train.global-batch-size, or --optimizer.first-moment-dtype bfloat16"
    return ConfigError("--gpus", gpus, rule, fix)
