"""Lists the layouts of a config that are valid on some GPUs, and why the others are not.

A layout is a mesh, the remat policy, the microbatches, the ZeRO stage, the virtual stages of a
pipeline and the row groups of tensor parallelism. `expert` varies if the model has experts.
Otherwise it stays as configured: it shards the batch like `data`, so varying it would list the same
layouts twice.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.components.experts import num_experts
from jaxpar.config import Config, ConfigError
from jaxpar.config.layout.fields import FIELDS
from jaxpar.config.remat_policies import REMAT_POLICIES, names_on_host
from jaxpar.config.schema.items import Remat
from jaxpar.config.validate import resolve

#: Numbers of virtual stages to try.
VIRTUAL_STAGES = (1, 2, 3, 4)


@dataclass
class Listing:
    """The layouts of a config: resolved configs, and how many were invalid by which rule.

    refused    rule -> number of layouts that violate it.
    examples   rule -> an example of the error.
    """

    configs: list[Config] = field(default_factory=list)
    refused: Counter = field(default_factory=Counter)
    examples: dict[str, ConfigError] = field(default_factory=dict)

    def refuse(self, error: ConfigError) -> None:
        """Count an invalid layout."""
        reason = f"{error.field}: {_in_general(error.rule)}"
        self.refused[reason] += 1
        self.examples.setdefault(reason, error)


def _in_general(rule: str) -> str:
    """Return a rule without this layout's numbers: the part after ", since ", if there is one."""
    _, since, why = rule.partition(", since ")
    return why if since else rule


def legal_layouts(
    cfg: Config,
    num_gpus: int,
    fixed: dict[str, Any],
    *,
    coarse: bool = False,
) -> Listing:
    """Return every layout that `validate.resolve` accepts.

    Validation treats remat policies independently of the other fields, so each mesh is resolved
    once, with the first policy. Policies that offload to host memory are tried only without a
    pipeline: the combination has not been tested on GPUs.

    Args:     fixed: fields of `parallel` with a fixed value, by name. coarse: list fewer layouts:
              microbatches in powers of two, at most two virtual stages, no row groups, no ZeRO-2.
    """
    found = Listing()
    policies = _policies(cfg, fixed)
    for values in _candidates(cfg, num_gpus, fixed, coarse):
        try:
            one = with_parallel(cfg, remat=policies[0], **values)
            legal = resolve(one, num_gpus, explain=False)
        except ConfigError as error:
            found.refuse(error)
            continue
        any_policy = "remat" in fixed or legal.parallel.pipeline == 1
        tried = [n for n in policies if any_policy or not names_on_host(n)]
        found.configs += [with_parallel(legal, remat=policy) for policy in tried]
    return found


def with_parallel(cfg: Config, **values: Any) -> Config:
    """Return the config with fields of `parallel` replaced."""
    return dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, **values))


def _policies(cfg: Config, fixed: dict[str, Any]) -> list[Remat]:
    """Return the remat policies to try."""
    if "remat" in fixed:
        return [fixed["remat"]]
    return list(dict.fromkeys([*REMAT_POLICIES, cfg.parallel.remat]))


def _candidates(
    cfg: Config, num_gpus: int, fixed: dict[str, Any], coarse: bool
) -> Iterator[dict[str, Any]]:
    """Yield values of FIELDS except remat: all meshes of the GPUs, and their other fields."""
    for expert in _expert_sizes(cfg, num_gpus, fixed):
        for mesh in meshes(num_gpus // expert, fixed):
            mesh |= {"expert": expert}
            rows = cfg.train.global_batch_size / (mesh["replica"] * mesh["data"] * expert)
            for rest in _splits(cfg, mesh, rows, fixed, coarse):
                yield mesh | rest


def _expert_sizes(cfg: Config, num_gpus: int, fixed: dict[str, Any]) -> list[int]:
    """Return the sizes of the expert axis to try. Those that split no experts equally are left out,
    unless they are fixed: validation then names the rule."""
    experts, configured = num_experts(cfg.model), max(cfg.parallel.expert, 1)
    sizes = divisors(math.gcd(experts, num_gpus)) if experts else [configured]
    sizes = [fixed["expert"]] if "expert" in fixed else sizes
    return [size for size in sizes if num_gpus % size == 0]


def meshes(num_gpus: int, fixed: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Yield sizes of the axes except `expert` whose product is the number of GPUs."""

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
    """Return the divisors in ascending order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def _splits(
    cfg: Config, mesh: dict[str, int], rows: float, fixed: dict[str, Any], coarse: bool
) -> Iterator[dict[str, Any]]:
    """Yield microbatches that divide a device's rows, ZeRO stages, virtual stages, row groups."""
    whole = int(rows) if rows == int(rows) else 1  # otherwise validation rejects the layout
    sharded = mesh["data"] * mesh["sequence"] * mesh["expert"] > 1
    in_stages = (
        mesh["tensor"] > 1 and mesh["pipeline"] > 1
    )  # otherwise matmuls run on shards of the sequence
    interleaves = mesh["pipeline"] > 1 and cfg.parallel.schedule == "1f1b"
    turns = in_stages and cfg.parallel.layer_loop == "unroll"
    options: dict[str, Sequence[int]] = {
        "num_microbatches": divisors(whole),
        "zero": (1, 2, 3) if sharded or cfg.parallel.gather_dtype != "compute" else (1,),
        "virtual_stages": VIRTUAL_STAGES if interleaves else (1,),
        "row_groups": (1, 2) if turns else (1,),
    }
    if coarse:
        options["num_microbatches"] = [d for d in divisors(whole) if d.bit_count() == 1]
        options["virtual_stages"] = options["virtual_stages"][:2]
        options["zero"] = [stage for stage in options["zero"] if stage != 2]
        options["row_groups"] = (1,)
    if size := cfg.train.micro_batch_size:
        options["num_microbatches"] = (max(whole // size, 1),)
    options |= {name: (fixed[name],) for name in options if name in fixed}
    for choice in itertools.product(*options.values()):
        values = dict(zip(options, choice, strict=True))
        once = values["num_microbatches"] == mesh["pipeline"] == 1
        if values["zero"] == 2 and once and "zero" not in fixed:
            continue  # without sums over microbatches, ZeRO-1 needs no more memory
        yield values


def values_of(cfg: Config) -> dict[str, Any]:
    """Return a layout's fields."""
    return {name: getattr(cfg.parallel, name) for name in FIELDS}


def describe(cfg: Config) -> str:
    """Describe a layout's mesh in a few words: "data 4, tensor 2"."""
    p = cfg.parallel
    axes = ("pipeline", "replica", "data", "expert", "sequence", "tensor")
    words = [f"{axis} {getattr(p, axis)}" for axis in axes if getattr(p, axis) > 1]
    if p.sequence > 1 and p.context != "allgather":
        words.append(p.context)
    return ", ".join(words) or "one GPU"
