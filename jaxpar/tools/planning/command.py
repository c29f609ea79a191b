"""The work of `python -m jaxpar.plan`: its questions, and their answers."""

import dataclasses
import functools
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.listed import written
from jaxpar.config.lists.step_sizes import step_sizes
from jaxpar.config.model_source import ModelReader
from jaxpar.config.schema.features import objective_in
from jaxpar.prediction import layouts
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GIB, GPUS, NETWORKS, gpu_named, network_named
from jaxpar.prediction.ranking import Layout, Plan, make_plan, nothing_fits
from jaxpar.runtime import terminal
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.stages import stage
from jaxpar.tools.planning import compiling, fields, questions, showing
from jaxpar.tools.planning.fields import read_fixed
from jaxpar.tools.planning.options import (
    DEFAULT_GPUS,
    DEFAULT_TOP,
    GoodputOptions,
    HardwareOptions,
    Options,
    PlanOptions,
)

#: Columns that the ranking needs, even if the output is not a terminal.
MIN_WIDTH = 118


#: Tokens of a vocabulary that is the data's, which is not there: Llama 2's.
ASSUMED_VOCABULARY = 32_000


@dataclass(frozen=True)
class Asked:
    """A parsed and checked command line."""

    options: PlanOptions
    name: str
    base: Config
    cfg: Config
    cluster: Cluster
    fixed: dict[str, Any]


def plan(
    options: Options, model_from: ModelReader, with_vocabulary: Callable[[Config], Config]
) -> int:
    """Print the answer, as tables or JSON. Returns the exit code.

    Args:     model_from: as in `ConfigArguments.checked`. with_vocabulary: takes the size of the
              vocabulary from the data.
    """
    # Planning computes only shapes, so it does not need a GPU.
    jax.config.update("jax_platforms", "cpu")
    width = max(terminal.console().width, MIN_WIDTH)
    console = terminal.console(highlight=False, width=width, quiet=options.json)
    match options:
        case HardwareOptions():
            record = hardware(console)
        case GoodputOptions():
            record = questions.answer_goodput(options, console)
        case PlanOptions():
            record = answer(asked_for(options, model_from, with_vocabulary), console)
    if options.json:
        print(json.dumps(record, indent=2))
    return 0


def asked_for(
    options: PlanOptions,
    model_from: ModelReader | None = None,
    with_vocabulary: Callable[[Config], Config] | None = None,
) -> Asked:
    """Check the options, and read the config.

    Args:     as in `plan`.
    Raises:   ConfigError if an option is invalid.
    """
    file = options.write or None
    check_file("--write", file, endings=(".py",), new=True, in_existing_folder=True)
    cluster = cluster_of(options)
    fill = functools.partial(_with_some_vocabulary, with_vocabulary) if with_vocabulary else None
    cfg = options.config.checked(model_from, fill)
    if (of := objective_in(cfg)) is not None:
        of.check_plan(cfg)
    name, base = options.config.name, options.config.base
    if not base.model.vocab_size and not options.config.asked(model_from).model.vocab_size:
        base = replace(base, **{"model.vocab_size": cfg.model.vocab_size})  # a run finds it again
    return Asked(options, name, base, cfg, cluster, read_fixed(options.fix or None, cfg))


def _with_some_vocabulary(with_vocabulary: Callable[[Config], Config], cfg: Config) -> Config:
    """Set a vocabulary that is the data's, or one of ASSUMED_VOCABULARY while there is no data."""
    try:
        return with_vocabulary(cfg)
    except ConfigError as error:
        if error.field != "data.path":
            raise
    said = f"vocabulary {ASSUMED_VOCABULARY:,}: assumed until {cfg.data.path} exists"
    print(said, file=sys.stderr, flush=True)
    return replace(cfg, **{"model.vocab_size": ASSUMED_VOCABULARY})


def cluster_of(options: PlanOptions) -> Cluster:
    """Return the GPUs and their network.

    Raises:   ConfigError for an unknown GPU or network, or if --nodes does not divide the GPUs.
    """
    gpu, network = gpu_named(options.gpu), network_named(options.network)
    count = options.gpus or DEFAULT_GPUS
    nodes = options.nodes or -(-count // gpu.per_host)
    if count % nodes:
        rule = f"must divide the number of GPUs, {count}"
        fix = f"use --nodes {max(n for n in range(1, nodes + 1) if count % n == 0)}"
        more = f"--gpus {-(-count // nodes) * nodes}"
        raise ConfigError("--nodes", nodes, rule, f"{fix}, or {more}")
    return Cluster(gpu, network, count, count // nodes)


def hardware(console: Console) -> dict[str, Any]:
    """Answer --hardware."""
    showing.show_hardware(console)
    return {
        "gpus": {gpu.name: dataclasses.asdict(gpu) for gpu in GPUS.values()},
        "networks": {network.name: dataclasses.asdict(network) for network in NETWORKS.values()},
    }


def answer(asked: Asked, console: Console) -> dict[str, Any]:
    """Print the answer about a config and return it as a record."""
    options = asked.options
    if options.min_gpus:
        return fewest(asked, console)
    return ranking(asked, console)


def ranking(asked: Asked, console: Console) -> dict[str, Any]:
    """Print the ranking, and the cost, compilation and config file of the best layouts."""
    options, cluster = asked.options, asked.cluster
    if options.compile:
        compiling.check_can_compile(asked.cfg, cluster, options.compile)
    load, quick = options.expert_imbalance, options.quick
    plan = make_plan(asked.cfg, cluster, asked.fixed, coarse=quick, imbalance=load)
    if not plan.fitting:
        raise nothing_fits(plan)
    kept = plan.fitting if options.all else showing.best_of_each_mesh(plan.fitting)
    chosen = kept[: options.top or DEFAULT_TOP]
    showing.show_plan(console, plan, chosen)
    record = showing.plan_record(plan, chosen)
    if len(step_sizes(asked.cfg).sizes) > 1:
        steps = asked.cfg.train.num_steps
        if asked.cfg.train.num_epochs:  # unknown before the data is open: one step after the last
            steps = step_sizes(asked.cfg).sizes[-1].step + 1
            console.print(
                "train.num_epochs depends on the data: counted is 1 step of the last size"
            )
        parts = questions.parts_of(chosen[0], cluster, steps, load)
        showing.show_parts(console, parts)
        record["sizes"] = questions.record_of(parts)
    if options.tokens:
        cost = questions.cost_of(chosen[0], cluster, options.tokens)
        showing.show_cost(console, cost)
        record["cost"] = dataclasses.asdict(cost)
    if options.compile:
        record["compiled"] = compile_first(chosen[: options.compile], cluster, console)
    record["command"] = fields.command_line(asked.name, asked.base, chosen[0].cfg)
    console.print(f"\nBest layout: {record['command']}", soft_wrap=True)
    if options.write:
        record["written"] = write_config(asked, chosen[0], plan)
        train = f"python -m jaxpar.train {shlex.quote(record['written'])}"
        console.print(f"written: {train}", soft_wrap=True)
    return record


def write_config(asked: Asked, layout: Layout, plan: Plan) -> str:
    """Write the layout as a config file and return its path.

    Raises:   ConfigError if it cannot be written.
    """
    path = Path(asked.options.write)
    where = showing.hardware_in_words(plan.cluster)
    said = f"{asked.name} on {where}, written by python -m jaxpar.plan."
    text = fields.config_file(asked.name, asked.base, layout.cfg, said)
    try:
        atomic.write(path, text.encode())
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError("--write", str(path), rule, "choose another folder") from error
    return str(path)


def compile_first(
    chosen: Sequence[Layout], cluster: Cluster, console: Console
) -> list[dict[str, Any]]:
    """Compile layouts one by one, and print XLA's peaks and the predicted ones."""
    pairs: list[tuple[Layout, compiling.CompiledMemory | str]] = []
    for layout in chosen:
        try:
            with stage(f"compiling {layouts.describe(layout.cfg)}"):
                pairs.append((layout, compiling.compile_layout(layout.cfg, cluster)))
        except RuntimeError as error:
            pairs.append((layout, str(error)))
    showing.show_compiled(console, pairs)
    return [
        {"error": found} if isinstance(found, str) else dataclasses.asdict(found)
        for _, found in pairs
    ]


def fewest(asked: Asked, console: Console) -> dict[str, Any]:
    """Answer --min-gpus."""
    count, layout = questions.fewest_gpus(asked.cfg, asked.cluster)
    words = layouts.describe(layout.cfg)
    console.print(
        f"{count} x {asked.cluster.gpu.name}: {words}, remat {written(layout.cfg.parallel.remat)}, "
        f"{layout.memory.total / GIB:.1f} GiB per GPU, {layout.time.rate:,.0f} tok/s/GPU"
    )
    return {"gpus": count, "layout": showing.layout_record(layout)}
