"""Formats a profile's devices, rates and memory as text."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxpar.monitoring.hlo import Instruction, Module
from jaxpar.monitoring.profile_folder import ProfileFacts
from jaxpar.runtime.tables import indented
from jaxpar.runtime.units import binary_size
from jaxpar.tools.profiling.memory import ProgramMemory
from jaxpar.tools.profiling.table import digits
from jaxpar.tools.profiling.trace.kernels import family, place_of

#: Columns and rows of the memory plot.
WIDTH, HEIGHT = 72, 8

_BARS = " ▁▂▃▄▅▆▇█"

CPU_NOTE = (
    "this is a CPU trace: instructions run on host threads with little overlap; communication "
    "includes waiting for the other devices; simulated devices share the cores"
)

#: A device is a straggler if its compute time exceeds the mean by this share.
SLOW = 0.02


def rates(profile: dict[str, Any], facts: ProfileFacts | None) -> str:
    """Return the FLOP/s of attention and model; "" if nothing is known."""
    lines = []
    if attention := profile.get("attention"):
        rate = f"{digits(attention['flops_per_second'] / 1e12)} TFLOP/s while its kernels run"
        flops = f"{digits(attention['flops'] / 1e12)} TFLOP per step and device"
        lines.append(f"  attention: {flops} (causal, one document per sequence), {rate}")
    if profile.get("model"):
        model = profile["model"]
        text = f"  model: {digits(model['flops'] / 1e12)} TFLOP per step and device (causal), "
        text += f"{digits(model['flops_per_second'] / 1e12)} TFLOP/s over the step"
        share = f", MFU {model['mfu']:.1%}" if model["mfu"] else ""
        tokens = f"; {facts.tokens:,} tokens per step" if facts else ""
        lines.append(text + share + tokens)
    return "\n".join(lines)


def devices(profile: dict[str, Any]) -> str:
    """Return a row per device, and the straggler."""
    each = profile["devices_ms"]
    if len(each) < 2:
        return ""
    names = ("step", "compute", "communication", "exposed", "idle")
    rows = [("device", *names)]
    rows += [(n, *(f"{ms[name]:,.1f}" for name in names)) for n, ms in each.items()]
    return indented(rows) + "\n  " + straggler(profile)["words"]


def straggler(profile: dict[str, Any]) -> dict[str, Any]:
    """Return the device with the longest compute time: {device, over, words}.

    All devices take the same time for a step, since they wait for one another in collectives. A
    slow one has more compute and less communication than the others.
    """
    compute = {n: ms["compute"] for n, ms in profile["devices_ms"].items()}
    mean = sum(compute.values()) / len(compute)
    slowest = max(compute, key=lambda n: compute[n])
    over = compute[slowest] / mean - 1 if mean else 0.0
    if over < SLOW:
        words = f"no straggler: compute times are at most {over:.1%} above their mean"
    else:
        words = f"straggler: device {slowest} computes {over:.1%} longer than the mean, and the "
        words += "others wait"
    return {"device": slowest, "over": over, "words": words}


def memory(found: ProgramMemory | None, module: Module | None, rows: int) -> str:
    """Return the memory by part, the largest buffers at the peak, and a plot."""
    if found is None:
        return "memory: the trace does not contain XLA's memory plan"
    temporaries = f"temporaries {binary_size(found.temporaries)}"
    if found.live:
        gaps = found.temporaries - found.peak
        temporaries += f" (peak {binary_size(found.peak)}, gaps {binary_size(gaps)})"
    parts = [
        f"state and batch {binary_size(found.arguments)}",
        temporaries,
        f"other results {binary_size(found.results)}",
    ]
    head = f"compiled memory per device: {binary_size(found.total)}\n  " + "   ".join(parts)
    largest = [
        f"{name} {binary_size(n)}" for name, n in found.given.items() if n > found.total / 1000
    ]
    if largest:
        head += "\n  arguments: " + "   ".join(largest)
    if not found.live:
        why = "the compilation cache does not store when temporaries are live: start the run with "
        return f"{head}\n  {why}--run.compilation-cache ''"
    return "\n\n".join([head, _buffers(found, rows), _plot(found, module)])


def _buffers(found: ProgramMemory, most: int) -> str:
    """Return temporaries at the peak, grouped by scope and shape."""
    sizes: Counter[tuple[str, str, str]] = Counter()
    count: Counter[tuple[str, str, str]] = Counter()
    for buffer in found.at_peak:
        phase, scope = place_of(buffer.scope) if buffer.scope else ("", "")
        key = (
            phase or "-",
            scope or "-",
            buffer.result or family(buffer.instruction.replace(".", "_")),
        )
        sizes[key] += buffer.size
        count[key] += 1
    table: list[tuple[str, ...]] = [("at the peak", "share", "count", "pass", "scope", "result")]
    for key, total in sizes.most_common(most):
        table.append((binary_size(total), f"{total / found.peak:.1%}", str(count[key]), *key))
    return indented(table, left=(3, 4, 5))


def _plot(found: ProgramMemory, module: Module | None) -> str:
    """Plot the bytes of temporaries in program order, with the maximum of each column."""
    live = [now for _, now in found.live]
    edges = [round(i * len(live) / WIDTH) for i in range(WIDTH + 1)]
    columns = [
        max(live[a:b] or [live[min(a, len(live) - 1)]]) for a, b in itertools.pairwise(edges)
    ]
    lines = area(columns, found.peak)
    labels = [binary_size(found.peak), *[""] * (HEIGHT - 2), "0"]
    width = max(map(len, labels))
    plot = [f"  {label:>{width}} |{line}" for label, line in zip(labels, lines, strict=True)]
    below = _passes(found, module, edges) if module is not None else ""
    plot.append(" " * (width + 4) + (below or "in program order"))
    return "\n".join(line.rstrip() for line in plot)


def area(values: Sequence[float], top: float) -> list[str]:
    """Return a filled plot of HEIGHT lines, with a resolution of an eighth of a line."""
    eighths = [math.ceil(8 * HEIGHT * value / top) if top else 0 for value in values]
    return [
        "".join(_BARS[min(max(n - 8 * row, 0), 8)] for n in eighths)
        for row in reversed(range(HEIGHT))
    ]


def _passes(found: ProgramMemory, module: Module, edges: Sequence[int]) -> str:
    """Return the line under the plot that marks where forward, backward and optimizer begin."""
    words = [_word(module.instructions.get(name)) for name, _ in found.live]
    marks = [" "] * (WIDTH + 12)
    for word in ("forward", "backward", "optimizer"):
        shares = [
            sum(w == word for w in words[a:b]) > (b - a) / 2 for a, b in itertools.pairwise(edges)
        ]
        if True in shares:
            column, text = shares.index(True), f"^{word} "
            if all(mark == " " for mark in marks[column : column + len(text)]):
                marks[column : column + len(text)] = text
    return "".join(marks).rstrip()


def _word(instruction: Instruction | None) -> str:
    if instruction is None or not instruction.scope:
        return ""
    phase, scope = place_of(instruction.scope)
    if scope.split("/")[0] == "optimizer":
        return "optimizer"
    return "backward" if phase == "recompute" else phase
