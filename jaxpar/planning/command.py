"""The command line of `python -m jaxpar.plan` and its output."""

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxpar.config import Config, ConfigError
from jaxpar.config.command_line import read_config
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.config.layout import fields as layout_fields
from jaxpar.config.lists.step_sizes import step_sizes
from jaxpar.config.model_source import ModelReader
from jaxpar.config.numerals import only_digits
from jaxpar.config.rules.limits import MAX_INT, MAX_SEQUENCE, Range
from jaxpar.planning import (
    advice,
    budget,
    checks,
    compiling,
    goodput,
    layouts,
    links,
    lowering,
    override,
    showing,
    whole_run,
)
from jaxpar.planning.checks import DEFAULT_TOP, MAX_GPUS
from jaxpar.planning.fixed import read_fixed
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.predict.hardware import GIB, GPUS, NETWORKS, gpu_named, network_named
from jaxpar.planning.predict.shard import EXPERT_IMBALANCE
from jaxpar.planning.predict.teacher import check_teacher
from jaxpar.planning.progress import on_stderr
from jaxpar.planning.ranking import Layout, Plan, make_plan, nothing_fits
from jaxpar.runtime.options import Parser
from jaxpar.runtime.stages import stage

EPILOG = """\
All other options set fields of the config: --data.seq-len 16384. The plan tries all values of the
parallel fields that define a layout (see --fix), whatever the config sets. Other fields, such as
parallel.context, apply to all layouts.
Exit codes: 0 planned, 2 invalid input or no layout fits.
"""


#: Columns that the ranking needs, even if the output is not a terminal.
MIN_WIDTH = 118


#: Default number of GPUs.
DEFAULT_GPUS = 8


#: Largest budget of tokens: far more text than exists.
MAX_TOKENS = 1e18


@dataclass(frozen=True)
class Asked:
    """A parsed and checked command line."""

    options: argparse.Namespace
    name: str
    base: Config
    cfg: Config
    cluster: Cluster
    fixed: dict[str, Any]


def parser(doc: str | None = None) -> Parser:
    """Return the parser of the program's own options.

    Args:     doc: the text of --help.
    """
    made = Parser(
        "python -m jaxpar.plan",
        doc,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    told = f"{known_configs()}, a .py file, or a run folder"
    add("config", nargs="?", metavar="CONFIG", help=told)
    told = f"total number of GPUs ({DEFAULT_GPUS})"
    made.whole("--gpus", None, Range(1, MAX_GPUS, DEFAULT_GPUS), help=told)
    add("--gpu", default="h200", help=f"kind of GPU: {', '.join(GPUS)} (h200)")
    told = "number of hosts (as few as possible for this GPU)"
    made.whole("--nodes", None, Range(1, MAX_GPUS, 1), help=told)
    told = f"network between hosts: {', '.join(NETWORKS)}, or its speed per GPU as 10gbit (ib400)"
    add("--network", default="ib400", help=told)
    add("--hardware", action="store_true", help="print the GPUs and networks, with sources")
    told = f"number of layouts to show ({DEFAULT_TOP})"
    made.whole("--top", None, Range(1, 1_000_000, DEFAULT_TOP), help=told)
    add("--all", action="store_true", help="show all layouts instead of the best of each mesh")
    add(
        "--fix",
        metavar="FIELD=VALUE,...",
        help=f"fix fields of the layout: {', '.join(layout_fields.FIELDS)}",
    )
    told = (
        "load of the fullest rank of an expert axis, relative to the mean, in the mean layer: "
        f"fullest_rank_mean of a run ({EXPERT_IMBALANCE})"
    )
    add("--expert-imbalance", type=float, default=EXPERT_IMBALANCE, help=told)
    told = "try fewer layouts, such as only powers of two of microbatches"
    add("--quick", action="store_true", help=told)
    add("--write", metavar="FILE", help="write the best layout as a config file, FILE.py")
    add("--json", action="store_true", help="print JSON instead of tables")
    told = "compile the best K layouts with XLA"
    made.whole("--compile", 0, Range(0, 1_000_000, 1), metavar="K", help=told)
    told = "lower the train step of the best K layouts, as each process would at its start"
    made.whole("--lower", 0, Range(0, 1_000_000, 1), metavar="K", help=told)
    add("--min-gpus", action="store_true", help="find the fewest GPUs that fit (implies --quick)")
    add(
        "--largest",
        choices=["batch", "sequence"],
        help="find the largest batch or sequence (implies --quick)",
    )
    add("--kv-cache", metavar="ROWSxTOKENS", help="memory of the KV cache for generation")
    add("--tokens", type=float, help="number of training tokens: prints the time and GPU-hours")
    add("--price", type=float, help="price of a GPU-hour: prints the cost of --tokens")
    add("--spot-price", type=float, help="the same for spot (preemptible) GPUs")
    add("--links", action="store_true", help="compare sums over replicas by their link's speed")
    add("--advice", action="store_true", help="best mesh axes by model size; takes no CONFIG")
    goodput.add_options(made)
    return made


def read_command(argv: Sequence[str], model_from: ModelReader | None = None) -> Asked:
    """Parse and check the command line.

    Args:     model_from: as in `read_config`.
    Raises:   ConfigError if an option is invalid.
    """
    options, rest = parser().parse_known_args(argv)
    if options.tokens is not None and not 1 <= options.tokens <= MAX_TOKENS:
        rule = f"must be at least 1, and at most {MAX_TOKENS:g}"
        raise ConfigError("--tokens", options.tokens, rule, "use --tokens 15e12")
    checks.check_imbalance(options.expert_imbalance)
    budget.check_price("--price", options.price, options.tokens)
    budget.check_price("--spot-price", options.spot_price, options.tokens)
    checks.check_questions(options)
    goodput.check(options)
    checks.check_compiled(options)
    checks.check_file(options.write)
    cluster = cluster_of(options)
    if options.advice or options.hardware or options.goodput:
        checks.check_no_config(options, rest)
        return Asked(options, "", Config(), Config(), cluster, {})
    first = [] if options.config is None else [options.config]
    cfg = read_config([*first, *rest], "jaxpar.plan", __doc__, model_from=model_from)
    check_teacher(cfg)
    base = load_config(options.config)
    return Asked(options, options.config, base, cfg, cluster, read_fixed(options.fix, cfg))


def cluster_of(options: argparse.Namespace) -> Cluster:
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


def answer(asked: Asked, console: Console) -> dict[str, Any]:
    """Print the answer and return it as a record."""
    options = asked.options
    if options.hardware:
        showing.show_hardware(console)
        return {
            "gpus": {gpu.name: dataclasses.asdict(gpu) for gpu in GPUS.values()},
            "networks": {
                network.name: dataclasses.asdict(network) for network in NETWORKS.values()
            },
        }
    if options.goodput:
        return goodput.answer(options, asked.cluster.num_gpus, console)
    if options.advice:
        return {"advice": [*give_advice(asked, console)]}
    if options.min_gpus:
        return fewest(asked, console)
    if options.largest:
        return largest(asked, console)
    if options.kv_cache:
        return inference(asked, console)
    return ranking(asked, console)


def ranking(asked: Asked, console: Console) -> dict[str, Any]:
    """Print the ranking, and the cost, compilation and config file of the best layouts."""
    options, cluster = asked.options, asked.cluster
    if options.compile:
        compiling.check_can_compile(asked.cfg, cluster, options.compile)
    load, quick = options.expert_imbalance, options.quick
    plan = make_plan(
        asked.cfg, cluster, asked.fixed, coarse=quick, imbalance=load, watch=on_stderr()
    )
    if not plan.fitting:
        raise nothing_fits(plan)
    kept = plan.fitting if options.all else showing.best_of_each_mesh(plan.fitting)
    chosen = kept[: options.top or DEFAULT_TOP]
    showing.show_plan(console, plan, chosen)
    record = showing.plan_record(plan, chosen)
    if options.links:
        record["links"] = compare_links(plan, console)
    if len(step_sizes(asked.cfg).sizes) > 1:
        steps = asked.cfg.train.num_steps
        if asked.cfg.train.num_epochs:  # unknown before the data is open: one step after the last
            steps = step_sizes(asked.cfg).sizes[-1].step + 1
            console.print(
                "train.num_epochs depends on the data: counted is 1 step of the last size"
            )
        parts = whole_run.parts_of(chosen[0], cluster, steps, load)
        showing.show_parts(console, parts)
        record["sizes"] = whole_run.record_of(parts)
    if options.tokens:
        prices = options.price, options.spot_price
        cost = budget.cost_of(chosen[0], cluster, options.tokens, *prices)
        showing.show_cost(console, cost)
        record["cost"] = dataclasses.asdict(cost)
    if options.compile:
        record["compiled"] = compile_first(chosen[: options.compile], cluster, console)
    if options.lower:
        record["lowered"] = lower_first(chosen[: options.lower], cluster, console)
    record["command"] = override.command_line(asked.name, asked.base, chosen[0].cfg)
    console.print(f"\nBest layout: {record['command']}", soft_wrap=True)
    if options.write:
        record["written"] = write_config(asked, chosen[0], plan)
        train = f"python -m jaxpar.train {shlex.quote(record['written'])}"
        console.print(f"written: {train}", soft_wrap=True)
    return record


def compare_links(plan: Plan, console: Console) -> list[dict[str, Any]]:
    """Print the sums of gradients over replicas by link speed, for the first layout that has any.

    Raises:   ConfigError if no layout has replicas.
    """
    layout = links.with_replicas(plan.fitting)
    if layout is None:
        rule = "needs a layout with replicas, and none fits"
        raise ConfigError("--links", True, rule, "use --fix replica=2, or more GPUs")
    rows = links.rows_of(layout, plan.cluster)
    links.show(console, layout, rows)
    speeds = [f"{speed:g}" for speed in links.SPEEDS]
    return [
        {
            "method": row.method,
            "bytes_sent": row.sent,
            "seconds_by_gbits": dict(zip(speeds, row.seconds, strict=True)),
        }
        for row in rows
    ]


def write_config(asked: Asked, layout: Layout, plan: Plan) -> str:
    """Write the layout as a config file and return its path.

    Raises:   ConfigError if it cannot be written.
    """
    path = Path(asked.options.write)
    where = showing.hardware_in_words(plan.cluster)
    said = f"{asked.name} on {where}, written by python -m jaxpar.plan."
    try:
        path.write_text(override.config_file(asked.name, asked.base, layout.cfg, said))
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


def lower_first(
    chosen: Sequence[Layout], cluster: Cluster, console: Console
) -> list[dict[str, Any]]:
    """Lower the train steps of layouts one by one, and print what was found.

    Raises:   ConfigError as `lowering.check_can_lower`.
    """
    steps = []
    for layout in chosen:
        with stage(f"lowering {layouts.describe(layout.cfg)}"):
            steps.append(lowering.lower_layout(layout.cfg, cluster))
    showing.show_lowered(console, chosen, steps)
    return [dataclasses.asdict(step) for step in steps]


def fewest(asked: Asked, console: Console) -> dict[str, Any]:
    """Answer --min-gpus."""
    count, layout = budget.fewest_gpus(asked.cfg, asked.cluster, watch=on_stderr())
    words = layouts.describe(layout.cfg)
    console.print(
        f"{count} x {asked.cluster.gpu.name}: {words}, remat {layout.cfg.parallel.remat}, "
        f"{layout.memory.total / GIB:.1f} GiB per GPU, {layout.time.rate:,.0f} tok/s/GPU"
    )
    return {"gpus": count, "layout": showing.layout_record(layout)}


def largest(asked: Asked, console: Console) -> dict[str, Any]:
    """Answer --largest batch and --largest sequence."""
    what, cluster = asked.options.largest, asked.cluster
    find = budget.largest_batch if what == "batch" else budget.longest_sequence
    found = find(asked.cfg, cluster, on_stderr())
    if found is None:
        raise nothing_fits(make_plan(asked.cfg, cluster, coarse=True))
    size, layout = found
    unit = "sequences in one global microbatch" if what == "batch" else "tokens per sequence"
    console.print(
        f"{size:,} {unit} on {showing.hardware_in_words(cluster)}: {layouts.describe(layout.cfg)}, "
        f"remat {layout.cfg.parallel.remat}, {layout.memory.total / GIB:.1f} GiB per GPU, "
        f"{layout.time.rate:,.0f} tok/s/GPU"
    )
    return {"largest": size, "of": what, "layout": showing.layout_record(layout)}


def inference(asked: Asked, console: Console) -> dict[str, Any]:
    """Answer --kv-cache 64x8192."""
    text = asked.options.kv_cache
    rows, times, slots = text.lower().partition("x")
    digits = times and only_digits(rows) and only_digits(slots)
    if not (digits and 0 < int(rows) <= MAX_INT and 0 < int(slots) <= MAX_SEQUENCE):
        rule = "must be SEQUENCESxTOKENS, both positive integers, "
        rule += f"at most {MAX_INT:,} and {MAX_SEQUENCE:,}"
        raise ConfigError("--kv-cache", text, rule, "use --kv-cache 64x8192")
    found = budget.inference_memory(asked.cfg, asked.cluster, int(rows), int(slots))
    showing.show_inference(console, int(rows), int(slots), found)
    return {"inference": [dataclasses.asdict(one) for one in found]}


def give_advice(asked: Asked, console: Console):
    """Answer --advice: print each shape once planned, and yield its record."""
    console.print(f"Fastest layouts on {asked.cluster.gpu.name}, T = 8,192 (coarse plans):")
    for one in advice.advise(asked.cluster):
        head = f"{one.case.name:>5} on {one.gpus:>3} GPUs, {one.case.batch:>5,} sequences: "
        if one.best is None:
            console.print(head + "nothing fits")
            yield {"model": one.case.name, "gpus": one.gpus, "best": None}
            continue
        console.print(head + in_short(one.best), soft_wrap=True)
        if one.runner_up is not None:
            slower = one.best.time.rate / one.runner_up.time.rate - 1
            other = f"{'':>36}{slower:.1%} ahead of {in_short(one.runner_up)}"
            console.print(other, soft_wrap=True)
        yield {
            "model": one.case.name,
            "parameters": one.parameters,
            "gpus": one.gpus,
            "best": showing.layout_record(one.best),
            "runner_up": one.runner_up and showing.layout_record(one.runner_up),
        }


def in_short(layout: Layout) -> str:
    """Describe a layout and its rate in one line."""
    p = layout.cfg.parallel
    words = f"{layouts.describe(layout.cfg)}, zero {p.zero}, remat {p.remat}"
    if p.num_microbatches > 1:
        words += f", {p.num_microbatches} microbatches"
    return f"{words}; {layout.time.rate:,.0f} tok/s/GPU, {layout.memory.total / GIB:.0f} GiB"
