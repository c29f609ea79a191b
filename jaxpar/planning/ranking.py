"""The layouts of a config on a cluster, predicted and in order: what fits, fastest first."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxpar.config import Config, ConfigError
from jaxpar.planning.layouts import describe, legal_layouts
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.predict.hardware import GIB
from jaxpar.planning.predict.kernels import attention_runs_on_reference
from jaxpar.planning.predict.memory import MemoryForecast, memory_of
from jaxpar.planning.predict.time import StepTime, step_time
from jaxpar.planning.progress import Watch, no_report


@dataclass(frozen=True)
class Layout:
    """One layout, predicted. `on_reference`: its attention has no kernel on this GPU."""

    cfg: Config
    memory: MemoryForecast
    time: StepTime
    on_reference: bool = False


@dataclass
class Plan:
    """All layouts of a config on a cluster.

    fitting    those whose peak is within the GPU's usable memory, fastest first.
    too_large  the others, smallest first.
    refused    rule -> how many layouts `validation` refuses by it; examples has an error of each.
    """

    cfg: Config
    cluster: Cluster
    fitting: list[Layout]
    too_large: list[Layout]
    refused: Counter
    examples: dict[str, ConfigError]

    @property
    def usable(self) -> float:
        """Bytes that a run may take on a GPU."""
        return self.cluster.gpu.usable_bytes

    def missing(self) -> float:
        """Bytes by which the smallest layout that does not fit misses, 0 if there is none."""
        return self.too_large[0].memory.total - self.usable if self.too_large else 0.0


def predict(cfg: Config, cluster: Cluster) -> Layout:
    """One layout.

    Args:     cfg: resolved.
    Raises:   ConfigError when `model.attention_backend` cannot serve it on this GPU, or the order
              of the tokens leaves it to the reference.
    """
    try:
        on_reference = attention_runs_on_reference(cfg, cluster.gpu)
    except ValueError as error:
        name = cfg.model.attention_backend
        fix = "use --model.attention-backend auto"
        rule = str(error).partition(": ")[2]
        raise ConfigError("model.attention_backend", name, rule, fix) from error
    p = cfg.parallel
    if on_reference and p.sequence > 1 and p.context != "ulysses":
        rule = f"has no attention kernel on {cluster.gpu.name} but the reference, which holds all "
        fix = "use --parallel.context ulysses"
        raise ConfigError("parallel.context", p.context, rule + "scores", fix)
    return Layout(
        cfg, memory_of(cfg, on_reference=on_reference), step_time(cfg, cluster), on_reference
    )


def make_plan(
    cfg: Config,
    cluster: Cluster,
    fixed: dict[str, Any] | None = None,
    *,
    coarse: bool = False,
    watch: Watch = no_report,
) -> Plan:
    """Every legal layout, predicted.

    Args:     fixed: fields of `parallel` that keep a value, by name. coarse, watch: as
              `legal_layouts`.
    """
    listing = legal_layouts(cfg, cluster.num_gpus, fixed or {}, coarse=coarse, watch=watch)
    layouts: list[Layout] = []
    for count, legal in enumerate(listing.configs):
        watch(count, f"of {len(listing.configs):,} layouts predicted")
        try:
            layouts.append(predict(legal, cluster))
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
    """The error for a plan without a layout that fits: by how much, and what would."""
    gpus, gpu = plan.cluster.num_gpus, plan.cluster.gpu
    on = f"{gpus} x {gpu.name}"
    if not plan.too_large:
        why = "they cannot be shared out to axes of the sizes that are kept"
        if plan.refused:
            (reason, _), *_ = plan.refused.most_common(1)
            first = plan.examples[reason]
            why = f"{first.field} = {first.value!r} {first.rule}"
        fix = "change what it names, or use another number of GPUs"
        return ConfigError("--gpus", gpus, f"gives no mesh that the config allows: {why}", fix)
    best = plan.too_large[0]
    short = plan.missing() / GIB
    rule = (
        f"is too few: the smallest layout ({describe(best.cfg)}, remat {best.cfg.parallel.remat}) "
        f"needs {best.memory.total / GIB:.1f} GiB on each of {on}, {short:.1f} more than its "
        f"{plan.usable / GIB:.1f}"
    )
    fix = "ask --min-gpus for the fewest that do, use a GPU with more memory, a smaller "
    fix += "--train.global-batch-size, or --optimizer.first-moment-dtype bfloat16"
    return ConfigError("--gpus", gpus, rule, fix)
