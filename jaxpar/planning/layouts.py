"""Every layout of a config on some GPUs: those that `validation` accepts, and why not the others.

A layout is a mesh, the remat policy, the microbatches, the ZeRO stage, the virtual stages of a
pipeline and the row groups of tensor parallelism. `expert` stays as configured: it acts as more of
`data`, so the layouts would be the same twice.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.config import Config, ConfigError
from jaxpar.config.layout_fields import FIELDS
from jaxpar.config.remat_policies import REMAT_POLICIES, names_on_host
from jaxpar.config.validate import resolve
from jaxpar.planning.progress import Watch, no_report

#: Virtual stages that are tried.
VIRTUAL_STAGES = (1, 2, 3, 4)


@dataclass
class Listing:
    """The layouts of a config: resolved configs, and how many were refused by which rule.

    refused    what a rule said -> how many layouts broke it.
    examples   the same -> one error of it.
    """

    configs: list[Config] = field(default_factory=list)
    refused: Counter = field(default_factory=Counter)
    examples: dict[str, ConfigError] = field(default_factory=dict)

    def refuse(self, error: ConfigError) -> None:
        """Count a layout that `validation` refuses."""
        reason = f"{error.field}: {_in_general(error.rule)}"
        self.refused[reason] += 1
        self.examples.setdefault(reason, error)


def _in_general(rule: str) -> str:
    """A rule without this layout's numbers: of "must be divisible by ..., since ...", the why."""
    _, since, why = rule.partition(", since ")
    return why if since else rule


def legal_layouts(
    cfg: Config,
    num_gpus: int,
    fixed: dict[str, Any],
    *,
    coarse: bool = False,
    watch: Watch = no_report,
) -> Listing:
    """Every layout that `validate.resolve` accepts and the trainer runs on GPUs.

    Remat policies are independent of the other fields in `validation`, so each mesh is resolved
    once, with the first of them. Those that keep values in host memory are tried without a pipeline
    alone: a ring there has run on no GPU.

    Args:     fixed: fields of `parallel` that keep a value, by name. coarse: fewer of them, for a
              first look: microbatches in powers of two, one or two virtual stages, no row groups.
              watch: called with how many have been examined.
    """
    found = Listing()
    policies = _policies(cfg, fixed)
    for count, values in enumerate(_candidates(cfg, num_gpus, fixed, coarse)):
        watch(count, "combinations of mesh, ZeRO stage and microbatches checked")
        try:
            legal = resolve(with_parallel(cfg, remat=policies[0], **values), num_gpus)
        except ConfigError as error:
            found.refuse(error)
            continue
        tried = [n for n in policies if "remat" in fixed or not _ring_on_host(legal, n)]
        found.configs += [with_parallel(legal, remat=policy) for policy in tried]
    return found


def _ring_on_host(cfg: Config, remat: str) -> bool:
    return cfg.parallel.pipeline > 1 and bool(names_on_host(remat))


def with_parallel(cfg: Config, **values: Any) -> Config:
    """The config with fields of `parallel` set."""
    return dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, **values))


def _policies(cfg: Config, fixed: dict[str, Any]) -> list[str]:
    """Remat policies to try."""
    if "remat" in fixed:
        return [fixed["remat"]]
    return list(dict.fromkeys([*REMAT_POLICIES, cfg.parallel.remat]))


def _candidates(
    cfg: Config, num_gpus: int, fixed: dict[str, Any], coarse: bool
) -> Iterator[dict[str, Any]]:
    """Values of FIELDS but remat: all meshes of so many GPUs, and what goes with each."""
    expert = max(cfg.parallel.expert, 1)
    if num_gpus % expert:
        return
    for mesh in meshes(num_gpus // expert, fixed):
        rows = cfg.train.global_batch_size / (mesh["replica"] * mesh["data"] * expert)
        for rest in _splits(cfg, mesh, rows, fixed, coarse):
            yield mesh | rest


def meshes(num_gpus: int, fixed: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Sizes of the axes besides `expert` that multiply to the GPUs."""

    def over(axes: list[str], left: int) -> Iterator[dict[str, int]]:
        axis, *rest = axes
        if not rest:
            if fixed.get(axis, left) == left:
                yield {axis: left}
            return
        for size in [fixed[axis]] if axis in fixed else divisors(left):
            if left % size == 0:
                yield from ({axis: size} | others for others in over(rest, left // size))

    yield from over(["pipeline", "replica", "sequence", "tensor", "data"], num_gpus)


def divisors(n: int) -> list[int]:
    """In order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def _splits(
    cfg: Config, mesh: dict[str, int], rows: float, fixed: dict[str, Any], coarse: bool
) -> Iterator[dict[str, Any]]:
    """Microbatches that divide a device's rows, ZeRO stages, virtual stages and row groups."""
    whole = int(rows) if rows == int(rows) else 1  # if not, `validation` says so
    sharded = mesh["data"] * mesh["sequence"] * max(cfg.parallel.expert, 1) > 1
    in_stages = mesh["tensor"] > 1 and mesh["pipeline"] > 1  # without, matmuls take pieces
    turns = in_stages and cfg.parallel.layer_loop == "unroll"
    options: dict[str, Sequence[int]] = {
        "num_microbatches": divisors(whole),
        "zero": (1, 3) if sharded or cfg.parallel.gather_dtype != "compute" else (1,),
        "virtual_stages": VIRTUAL_STAGES if mesh["pipeline"] > 1 else (1,),
        "row_groups": (1, 2) if turns else (1,),
    }
    if coarse:
        options["num_microbatches"] = [d for d in divisors(whole) if d.bit_count() == 1]
        options["virtual_stages"] = options["virtual_stages"][:2]
        options["row_groups"] = (1,)
    options |= {name: (fixed[name],) for name in options if name in fixed}
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


def values_of(cfg: Config) -> dict[str, Any]:
    """A layout's fields."""
    return {name: getattr(cfg.parallel, name) for name in FIELDS}


def describe(cfg: Config) -> str:
    """A layout in a few words: "data 4, tensor 2, zero 3, remat dots"."""
    p = cfg.parallel
    axes = ("pipeline", "replica", "data", "expert", "sequence", "tensor")
    words = [f"{axis} {getattr(p, axis)}" for axis in axes if getattr(p, axis) > 1]
    if p.sequence > 1 and p.context != "allgather":
        words.append(p.context)
    return ", ".join(words) or "one GPU"
