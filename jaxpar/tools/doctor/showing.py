"""Formats an examination's results as tables."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape

from jaxpar.prediction.hardware import Gpu, gpu_of_kind
from jaxpar.runtime.gpus.nvml import GpuFacts
from jaxpar.runtime.tables import rich_table, titled
from jaxpar.runtime.timing import Spread
from jaxpar.runtime.units import binary_size
from jaxpar.tools.doctor.checks.findings import Finding
from jaxpar.tools.doctor.checks.measured import Rates, expectations
from jaxpar.tools.doctor.facts import HostFacts
from jaxpar.tools.doctor.measure import links as links_of
from jaxpar.tools.doctor.measure.bandwidth import BandwidthRow
from jaxpar.tools.doctor.measure.links import HostRow, Link
from jaxpar.tools.doctor.options import SECTIONS

STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}

#: Packages that only some commands need.
OPTIONAL = ("safetensors", "pyarrow", "lm-eval")

#: Versions that are printed; the JSON has all of them.
MAIN_VERSIONS = (
    *("python", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "driver"),
    *("driver CUDA", "CUDA runtime", "cuDNN", "cuBLAS", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("jaxpar", "flax", "optax", "orbax-checkpoint", "numpy", *OPTIONAL),
)

#: Most devices for which links are printed as a matrix.
WIDEST_MATRIX = 16


def heading(section: str, seconds: float) -> str:
    """Return the line above a section's tables."""
    return f"\n[bold]{section}[/bold]: {SECTIONS[section]} ({seconds:.1f} s)"


def versions(facts: HostFacts) -> str:
    """Return the main versions as a paragraph."""
    there = [f"{n} {facts.versions[n]}" for n in MAIN_VERSIONS if facts.versions.get(n, "-") != "-"]
    missing = [name for name in OPTIONAL if facts.versions.get(name) == "-"]
    text = escape("  " + ", ".join(there))
    return text + (f"\n  not installed: {', '.join(missing)} (optional)" if missing else "")


def environment(facts: HostFacts, was_set: Sequence[str]) -> list[str]:
    """Return the variables set by the user and by this program, one per line."""
    given = [f"  {name}={value}" for name, value in facts.environment.items()]
    return [escape(line) for line in (*given, *(f"  set here: {item}" for item in was_set))]


def hardware(facts: HostFacts) -> list[Any]:
    """Return a host's summary, its table of GPUs and its InfiniBand ports."""
    host = facts.host
    shm = "no /dev/shm" if host["shm"] is None else f"/dev/shm {host['shm'] / 2**30:.1f} GiB"
    numa = f"{host['numa_nodes']} NUMA nodes, " if (host["numa_nodes"] or 0) > 1 else ""
    line = f"  {host['name']}, {host['system']}: {host['cores']:g} cores, {numa}"
    line += f"{host['memory'] / 2**30:.0f} GiB, {shm}"
    shown: list[Any] = [escape(line)]
    if facts.gpus:
        columns = "GPU name GiB W,limit MHz,max °C ECC NVLinks NUMA".split()
        rows = [_gpu_cells(facts, gpu) for gpu in facts.gpus]
        shown.append(rich_table(columns, rows))
    for port in facts.infiniband:
        shown.append(escape(f"  {port['card']}/{port['port']}: {port['state']}, {port['rate']}"))
    if facts.gpus:
        shown += [escape(line) for line in _network(facts.network)]
    return shown


def _network(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the variables for the network to other hosts, with their reasons."""
    yield f"  network to other hosts: {found['network']}, {found['why']}"
    for name, value in found["to_set"].items():
        yield f"    {name}={value}: set in runs on several hosts"
    for name, value in found["kept"].items():
        yield f"    {name}={value}: yours"
    for name, value, why, source in found["suggested"]:
        yield f"    consider {name}={value}: {why} ({source})"


def _gpu_cells(facts: HostFacts, gpu: GpuFacts) -> list[str]:
    up = [speed for speed in gpu.nvlinks if speed is not None]
    memory = None if gpu.memory_total is None else gpu.memory_total / 2**30
    numbers = (memory, gpu.power_limit, gpu.max_sm_clock, gpu.temperature)
    node = facts.numa.node.get(gpu.address)
    return [
        str(gpu.index),
        gpu.name,
        *("-" if value is None else f"{value:.0f}" for value in numbers),
        "-" if gpu.ecc is None else "on" if gpu.ecc else "off",
        f"{len(up)} x {up[0]:.1f} GB/s" if up else "-",
        "-" if node is None else str(node),
    ]


def collectives(mesh: str, rows: Sequence[Mapping[str, Any]]) -> Group:
    """Return the verified collectives: a row per collective, a column per set of axes."""
    columns = list(dict.fromkeys(" and ".join(row["axes"]) for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row["collectives"]))
    wrong: dict[tuple[str, str], int] = {}
    for row in rows:
        for name in row["collectives"]:
            at = name, " and ".join(row["axes"])
            bad = sum(one["collective"] == name for one in row["wrong"])
            wrong[at] = wrong.get(at, 0) + bad

    def cell(name: str, axes: str) -> str:
        bad = wrong.get((name, axes))
        return "." if bad is None else f"[bold red]{bad} wrong[/bold red]" if bad else "correct"

    lines = [(name, *(cell(name, axes) for axes in columns)) for name in names]
    sizes = " and ".join(dict.fromkeys(f"{row['elements']:,}" for row in rows))
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in rows))
    return titled(f"  mesh {mesh}; {dtypes}, shards of {sizes} elements", ["over", *columns], lines)


def bandwidth(rows: Sequence[BandwidthRow]) -> list[Group]:
    """Return time, bus and algorithm bandwidth by size, with a column per collective."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    at = {(row.kind, row.size): row for row in rows}
    # Sizes are rounded to integers per device, depending on the collective.
    steps = _steps(sorted({row.size for row in rows}))
    scale, unit = (1e9, "GB/s") if max(row.bus for row in rows) > 10e9 else (1e6, "MB/s")

    def made(title: str, cell) -> Group:
        lines = []
        for step in steps:
            found = {kind: at[kind, size] for kind in kinds for size in step if (kind, size) in at}
            cells = (cell(found[kind]) if kind in found else "-" for kind in kinds)
            lines.append((binary_size(step[-1]), *cells))
        return titled(f"  {title}", ["size", *kinds], lines)

    return [
        made("µs per call, and how much slower the slowest batch is", _time),
        made(f"bus bandwidth, {unit}", lambda row: f"{row.bus / scale:,.1f}"),
        made(f"algorithm bandwidth, {unit}", lambda row: f"{row.algorithm / scale:,.1f}"),
    ]


def hosts(rows: Sequence[HostRow]) -> list[Group]:
    """Return times and bus bandwidth per device, within hosts and across them."""
    if not rows:
        return []
    ways = list(dict.fromkeys(one.over for one in rows))
    at = {(one.over, one.row.kind, i): one.row for way in ways for i, one in _numbered(rows, way)}
    scale, unit = (1e9, "GB/s") if max(one.row.bus for one in rows) > 10e9 else (1e6, "MB/s")
    lines = []
    for _, kind, i in (key for key in at if key[0] == ways[-1]):
        found = [at[way, kind, i] for way in ways]
        cells = [(_time(row), f"{row.bus / scale:,.1f}") for row in found]
        lines.append((kind, binary_size(found[-1].size), *itertools.chain(*cells)))
    columns = [text for way in ways for text in (f"µs {way}", unit)]
    title = "  bus bandwidth of each device, while all devices of a host communicate"
    return [titled(title, ["", "size", *columns], lines)]


def _numbered(rows: Sequence[HostRow], way: str) -> Iterator[tuple[int, HostRow]]:
    """Yield the rows of a way, each with the number of its size: sizes are rounded."""
    sizes: dict[str, int] = {}
    for one in rows:
        if one.over == way:
            sizes[one.row.kind] = sizes.get(one.row.kind, -1) + 1
            yield sizes[one.row.kind], one


def _steps(sizes: Sequence[int]) -> list[list[int]]:
    steps: list[list[int]] = []
    for size in sizes:
        if steps and size < 1.5 * steps[-1][0]:
            steps[-1].append(size)
        else:
            steps.append([size])
    return steps


def _time(row: BandwidthRow) -> str:
    return _spread(row.call)


def _spread(call: Spread) -> str:
    return f"{call.median * 1e6:,.1f} +{call.slowest / call.median - 1:.0%}"


def links(found: Sequence[Link], devices: int) -> list[Group | str]:
    """Return the bandwidth between all pairs of devices; with many devices, the slowest."""
    middle = links_of.median(found)
    if devices > WIDEST_MATRIX:
        slowest = sorted(found, key=lambda link: link.slowest)[:8]
        told = [f"{k.pair[0]}-{k.pair[1]} {k.slowest / 1e9:.1f}" for k in slowest]
        text = f"  {len(found)} pairs, median {middle / 1e9:.1f} GB/s in one direction"
        return [f"{text}; the slowest: {', '.join(told)}"]
    one: dict[tuple[int, int], float] = {}
    both: dict[tuple[int, int], float] = {}
    for link in found:
        a, b = link.pair
        one |= {(a, b): link.there, (b, a): link.back}
        both |= {(a, b): link.both, (b, a): link.both}
    return [
        _matrix("GB/s in one direction, from row to column", one, devices, middle),
        _matrix("GB/s in both directions combined", both, devices, 2 * middle),
    ]


def _matrix(
    title: str, speeds: Mapping[tuple[int, int], float], devices: int, median: float
) -> Group:
    def cell(a: int, b: int) -> str:
        if a == b:
            return "."
        speed = speeds[a, b]
        text = f"{speed / 1e9:.3g}"
        return f"[red]{text}[/red]" if speed < links_of.SLOW * median else text

    rows = [(str(a), *(cell(a, b) for b in range(devices))) for a in range(devices)]
    return titled(f"  {title}", ["", *map(str, range(devices))], rows)


def rates(found: Rates, units: Mapping[tuple[str, str], str], kind: str) -> Group:
    """Return each rate: median, slowest, and shares of the data sheet and of the expected rate."""
    gpu = gpu_of_kind(kind)
    rows = []
    for (what, detail), each in found.items():
        middle, low = statistics.median(each), min(each)
        scale, unit = (1e12, "TFLOP/s") if units[what, detail] == "FLOP/s" else (1e9, "GB/s")
        cells = [what, detail, f"{middle / scale:,.4g}", f"{low / scale:,.4g}", unit]
        rows.append((*cells, *_shares(gpu, what, middle)))
    columns = ["what", "size", "median", "slowest", "", "of data sheet", "of expected"]
    title = "  per device, all devices measured at the same time"
    return titled(title, columns, rows, left=(0, 1, 4))


def _shares(gpu: Gpu | None, what: str, rate: float) -> tuple[str, str]:
    if gpu is None:
        return "-", "-"
    peaks = {"matmul bfloat16": gpu.peak.value, "matmul float8": 2 * gpu.peak.value}
    expected = expectations(gpu).get(what)
    of_peak = f"{rate / peaks[what]:.0%}" if what in peaks else "-"
    return of_peak, f"{rate / expected:.0%}" if expected else "-"


def checklist(found: Iterable[tuple[str, Finding]]) -> Group:
    """Return the table of findings, each with its remedy."""
    rows = []
    for _, finding in found:
        style = STYLES[finding.status]
        said = escape(finding.said)
        if finding.where:
            said += f" [dim]({escape(finding.where)})[/dim]"
        if finding.remedy:
            said += f"\n-> {escape(finding.remedy)}"
        rows.append((f"[{style}]{finding.status}[/{style}]", escape(finding.check), said))
    made = rich_table(["", "check", "found"], rows, left=(0, 1, 2), wrapped=(2,))
    return Group("\n[bold]checklist[/bold]", made)


def summary(found: Iterable[tuple[str, Finding]], seconds: float) -> str:
    """Return the last line: how many checks failed, warned, passed or were skipped."""
    count = {status: 0 for status in STYLES}
    for _, finding in found:
        count[finding.status] += 1
    told = [f"{n} {words}" for n, words in (
        (count["fail"], "failed"), (count["warn"], "with warnings"), (count["pass"], "passed"),
        (count["skip"], "skipped"),
    )]  # fmt: skip
    return f"{', '.join(told)}; {seconds:.0f} s"
