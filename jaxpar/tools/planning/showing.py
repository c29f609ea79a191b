"""Formats a plan as tables, and as a record for JSON."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group

from jaxpar.components.experts import num_experts
from jaxpar.components.model import in_words as in_words_of_layers
from jaxpar.config.layout.layer_split import is_equal, layers_per_chunk
from jaxpar.config.listed import written
from jaxpar.config.values import to_values
from jaxpar.kernels.grouped_matmul.capability import HOPPER
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GIB, GPUS, NETWORKS, Gpu, HardwareFigure
from jaxpar.prediction.layouts import describe, values_of
from jaxpar.prediction.matrices import iteration_flops
from jaxpar.prediction.memory import MemoryForecast, host_bytes
from jaxpar.prediction.ranking import Layout, Plan
from jaxpar.prediction.startup import alignment_hints
from jaxpar.prediction.time import StepTime
from jaxpar.runtime.tables import rich_table, titled
from jaxpar.runtime.units import duration
from jaxpar.tools.planning import questions
from jaxpar.tools.planning.compiling import CompiledMemory
from jaxpar.tools.planning.questions import RunPart, TrainingCost

MEMORY_PARTS = "weights optimizer gradients activations logits gathered buffers".split()

#: Number of layouts whose parts are shown.
IN_DETAIL = 3

#: The unit in which --hardware shows a figure of a GPU, and its size.
SHOWN_IN: dict[str, tuple[float, str]] = {
    "memory": (GIB, "GiB"),
    **dict.fromkeys(("peak", "matmul", "float8"), (1e12, "TFLOP/s")),
    **dict.fromkeys(("bandwidth", "memory_peak"), (1e12, "TB/s")),
    **dict.fromkeys(("nvlink", "host_link"), (1e9, "GB/s")),
    "attention": (1, "x"),
}

#: Names of parts in the tables, where they differ from those in the JSON.
TITLES = {"in all": "total"}


def best_of_each_mesh(layouts: Iterable[Layout]) -> list[Layout]:
    """Return the first layout of each mesh."""
    found: dict[str, Layout] = {}
    for layout in layouts:
        found.setdefault(describe(layout.cfg), layout)
    return list(found.values())


def show_plan(console: Console, plan: Plan, chosen: Sequence[Layout]) -> None:
    """Print the ranking, the parts of the first layouts, and why others are not listed."""
    cluster, fits = plan.cluster, len(plan.fitting)
    legal = fits + len(plan.too_large)
    console.print(
        f"{legal:,} legal layouts on {hardware_in_words(cluster)}: {fits:,} fit "
        f"{plan.usable / GIB:.1f} GiB per GPU"
    )
    layers = next((layout.cfg.model.layers for layout in chosen), ())
    if len(set(layers)) > 1:
        console.print(f"layers: {in_words_of_layers(layers)}")
    console.print(_ranking(chosen))
    detail = chosen[:IN_DETAIL]
    console.print(_parts("Peak memory, GiB per GPU", detail, _memory_cells))
    console.print(_parts("Step time, ms", detail, _time_cells))
    for line in _remarks(plan, chosen):
        console.print(line)


def hardware_in_words(cluster: Cluster) -> str:
    """Describe a cluster: "16 x h200, 8 per host, ib400 between hosts"."""
    text = f"{cluster.num_gpus} x {cluster.gpu.name}"
    if cluster.num_gpus > cluster.per_host:
        text += f", {cluster.per_host} per host, {cluster.network.name} between hosts"
    return text


def _ranking(chosen: Sequence[Layout]) -> Group:
    columns = "mesh ZeRO remat M v g GiB step,s tok/s/GPU MFU full".split()
    rows = []
    for i, layout in enumerate(chosen, 1):
        p, t = layout.cfg.parallel, layout.time
        cells = [p.zero, written(p.remat), p.num_microbatches, p.virtual_stages, p.row_groups]
        rows.append(
            (
                f"{i}. {describe(layout.cfg)}",
                *map(str, cells),
                f"{layout.memory.total / GIB:.1f}",
                f"{t.total:.3f}",
                f"{t.rate:,.0f}",
                f"{t.mfu:.1%}",
                f"{t.mfu_full:.1%}",
            )
        )
    legend = "M microbatches, v virtual stages, g row groups; MFU: causal, full: full attention"
    return titled(legend, columns, rows)


def _parts(title: str, layouts: Sequence[Layout], cells) -> Group:
    by_layout = [cells(layout) for layout in layouts]
    names = list(dict.fromkeys(name for found in by_layout for name in found))
    last = ("contention", "gaps", "in all")
    names.sort(key=lambda name: last.index(name) if name in last else -1)
    rows = [
        (
            TITLES.get(name, name),
            *(f"{found[name]:,.1f}" if found.get(name) else "-" for found in by_layout),
        )
        for name in names
    ]
    return titled(title, ["", *(f"{i}." for i in range(1, len(layouts) + 1))], rows)


def _memory_cells(layout: Layout) -> dict[str, float]:
    parts = {name: getattr(layout.memory, name) / GIB for name in MEMORY_PARTS}
    return parts | {"in all": layout.memory.total / GIB}


def _time_cells(layout: Layout) -> dict[str, float]:
    return {name: seconds * 1e3 for name, seconds in time_parts(layout.time).items()}


def time_parts(time: StepTime) -> dict[str, float]:
    """Return seconds by part, with the exposed communication of each axis."""
    own = "matmul attention elementwise optimizer bubble".split()
    parts = {name: getattr(time, name) for name in own}
    parts |= {f"exposed: {axis}": seconds for axis, seconds in time.exposed.items()}
    parts |= {"contention": time.contention, "gaps": time.gaps}
    parts |= {"frozen model": time.frozen} if time.frozen else {}
    return parts | {"in all": time.total}


def _remarks(plan: Plan, chosen: Sequence[Layout]) -> list[str]:
    lines = []
    if plan.too_large:
        nearest = plan.too_large[0]
        lines.append(
            f"Too large: {len(plan.too_large):,}, the smallest by {plan.missing() / GIB:.1f} GiB "
            f"({describe(nearest.cfg)}, remat {written(nearest.cfg.parallel.remat)})."
        )
    if plan.refused:
        lines.append(f"Invalid: {sum(plan.refused.values()):,}, by violated rule:")
        lines += [f"  {n:>6,}  {reason}" for reason, n in plan.refused.most_common(8)]
    lines += [f"Layers per stage: {text}." for text in _unequal_stages(chosen)]
    lines += [f"Hint: {hint}." for hint in alignment_hints(chosen[0].cfg)] if chosen else []
    lines += caveats(plan, chosen)
    return lines


def _unequal_stages(chosen: Sequence[Layout]) -> Iterator[str]:
    """Yield the numbers of layers of each of these layouts whose stages are unequal."""
    for layout in chosen:
        if not is_equal(layout.cfg):
            yield f"{written(layers_per_chunk(layout.cfg))} ({describe(layout.cfg)})"


def caveats(plan: Plan, chosen: Sequence[Layout]) -> list[str]:
    """Return what this plan relies on that was never compared with measurements."""
    cfg, cluster = plan.cfg, plan.cluster
    guesses = []
    if cluster.gpu.name != "h200":
        guesses.append(f"{cluster.gpu.name}'s rates are estimates")
    if cluster.num_gpus > cluster.per_host:
        guesses.append("networks were not measured")
    if num_experts(cfg.model):
        guesses += experts_caveats(cluster, chosen)
    if cfg.lora:
        guesses.append("adapters were not compared with measurements")
    if cfg.parallel.layer_loop == "scan":
        guesses.append("only unrolled layers were measured")
    if cfg.compute.dtype != "bfloat16":
        guesses.append("only bfloat16 was measured")
    if there := max((host_bytes(layout.cfg) for layout in chosen), default=0.0):
        of_each = f"{there / GIB:,.1f} GiB per GPU and microbatch"
        guesses.append(
            f"values in host memory ({of_each}) were measured only on two GPUs of one host"
        )
    if any(layout.on_reference for layout in chosen):
        guesses.append("some of these layouts have no attention kernel on this GPU")
    return [f"Estimates: {'; '.join(guesses)} (docs/planning.md)."] if guesses else []


def experts_caveats(cluster: Cluster, chosen: Sequence[Layout]) -> Iterator[str]:
    """Yield what predictions of experts rely on. Compared were data 2, expert 2 and expert 4."""
    if cluster.num_gpus > 4:
        yield "experts were compared on two and four GPUs only"
    fields = (layout.cfg.parallel for layout in chosen)
    if any(p.pipeline * p.tensor * p.sequence * p.replica > 1 for p in fields):
        yield "with experts, only the axes data and expert were measured"
    if cluster.gpu.compute_capability != HOPPER.compute_capability:
        yield f"experts have no kernel on {cluster.gpu.name}, and are far slower than predicted"


# ------------------------------------------------------------------------------- other answers


def show_cost(console: Console, cost: TrainingCost) -> None:
    """Print the time and GPU-hours of a number of tokens."""
    text = f"{cost.tokens:,.0f} tokens: {cost.steps:,} steps, {duration(cost.seconds)}, "
    text += f"{cost.gpu_hours:,.0f} GPU-hours; excluding evaluation, checkpoints and failures"
    console.print(text)


def show_parts(console: Console, parts: Sequence[RunPart]) -> None:
    """Print the sizes of the steps of a run, on its first layout, and the time of the whole."""
    columns = "after_step sequences tokens_each M GiB step,s tok/s/GPU steps time".split()
    rows = []
    for part in parts:
        time, memory = part.layout.time, part.layout.memory.total
        rows.append(
            (
                f"{part.size.step:,}",
                f"{part.size.rows:,}",
                f"{part.size.length:,}",
                str(part.layout.cfg.parallel.num_microbatches),
                f"{memory / GIB:.1f}",
                f"{time.total:.3f}",
                f"{time.rate:,.0f}",
                f"{part.steps:,}",
                duration(part.seconds),
            )
        )
    console.print("Sizes of the steps, on layout 1")
    console.print(rich_table([name.replace("_", " ") for name in columns], rows))
    told = questions.in_words(parts)
    console.print(f"Whole run: {told}; without evaluation, checkpoints and failures")


def show_compiled(console: Console, pairs: Sequence[tuple[Layout, CompiledMemory | str]]) -> None:
    """Print XLA's peaks and the predicted ones."""
    rows = []
    for i, (layout, compiled) in enumerate(pairs, 1):
        predicted = layout.memory.total
        cells = [f"{i}. {describe(layout.cfg)}, remat {written(layout.cfg.parallel.remat)}"]
        cells.append(f"{predicted / GIB:.1f}")
        if isinstance(compiled, str):
            cells += ["failed", compiled[:60], ""]
        else:
            error = predicted / compiled.total - 1
            cells += [f"{compiled.total / GIB:.1f}", f"{error:+.1%}", f"{compiled.seconds:.0f} s"]
        rows.append(cells)
    columns = ["compiled without a GPU", "predicted GiB", "XLA's GiB", "error", "took"]
    console.print(rich_table(columns, rows))


def show_hardware(console: Console) -> None:
    """Print every figure of the GPUs and networks with its source."""
    for gpu in GPUS.values():
        console.print(f"{gpu.name}: {gpu.device_kind}")
        for name, value, source in _figures(gpu):
            console.print(f"  {name:<10} {value:>15}  {source}", soft_wrap=True)
    console.print("between hosts, per GPU:")
    for n in NETWORKS.values():
        value = f"{n.bandwidth.value / 1e9:.1f} GB/s"
        console.print(f"  {n.name:<10} {value:>15}  {n.bandwidth.source}", soft_wrap=True)


def _figures(gpu: Gpu) -> list[tuple[str, str, str]]:
    rows = []
    for name, value in vars(gpu).items():
        if isinstance(value, HardwareFigure):
            scale, unit = SHOWN_IN[name]
            rows.append((name, f"{value.value / scale:,.4g} {unit}", value.source))
    return rows


# ------------------------------------------------------------------------------------- records


def plan_record(plan: Plan, chosen: Sequence[Layout]) -> dict[str, Any]:
    """Return the plan for --json."""
    return {
        "gpu": plan.cluster.gpu.name,
        "gpus": plan.cluster.num_gpus,
        "gpus_per_host": plan.cluster.per_host,
        "network": plan.cluster.network.name,
        "usable_bytes": plan.usable,
        "fitting": len(plan.fitting),
        "too_large": len(plan.too_large),
        "refused": dict(plan.refused),
        "layouts": [layout_record(layout) for layout in chosen],
        "caveats": caveats(plan, chosen),
    }


def layout_record(layout: Layout) -> dict[str, Any]:
    """Return one layout: its fields, bytes and seconds by part."""
    t = layout.time
    return {
        "parallel": {name: to_values(value) for name, value in values_of(layout.cfg).items()},
        "layers_per_stage": list(layers_per_chunk(layout.cfg)),
        "memory_bytes": _memory_record(layout.memory),
        "seconds": time_parts(t),
        "sent_bytes": {traffic.axis: traffic.sent for traffic in t.traffic},
        "optimizer_flops": iteration_flops(layout.cfg),
        "tokens_per_second_per_gpu": t.rate,
        "mfu_causal": t.mfu,
        "mfu_full_attention": t.mfu_full,
    }


def _memory_record(memory: MemoryForecast) -> dict[str, Any]:
    parts = {name: getattr(memory, name) for name in MEMORY_PARTS}
    return parts | {"in all": memory.total, "peak_at": memory.moment}
