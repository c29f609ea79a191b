"""How a host's GPUs and network cards are connected, from `nvidia-smi`: NVLink, PCIe, NUMA."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Colors and underlines, which `nvidia-smi topo -m` writes even to a pipe.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Matrix:
    """The output of `nvidia-smi topo -m`.

    links      the connection of each pair of GPUs: "NV18" (18 NVLinks), or PCIe: "PIX", "PXB",
               "PHB", "NODE", "SYS", from a single bridge to across sockets.
    cards      names of the network cards nearest to each GPU.
    cpus, numa   cores and NUMA node nearest to each GPU.
    """

    links: dict[str, dict[str, str]] = field(default_factory=dict)
    cards: dict[str, list[str]] = field(default_factory=dict)
    cpus: dict[str, str] = field(default_factory=dict)
    numa: dict[str, str] = field(default_factory=dict)


def read_matrix(text: str) -> Matrix:
    """Parse the output of `nvidia-smi topo -m`.

    Raises:   ValueError if the text has no table.
    """
    lines = _ESCAPES.sub("", text).splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b", line)]
    if not heads:
        raise ValueError("no table of GPUs in the output of `nvidia-smi topo -m`")
    columns = [c.strip() for c in re.split(r"\t+|\s{2,}", lines[heads[0]].strip())]
    devices = [c for c in columns if re.fullmatch(r"GPU\d+|NIC\d+|mlx\d+_\d+", c)]
    names = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), re.MULTILINE))
    found = Matrix()
    for line in lines[heads[0] + 1 :]:
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        ways = dict(zip(devices, words[1:], strict=False))
        gpu, rest = words[0], words[1 + len(devices) :]
        found.links[gpu] = {d: w for d, w in ways.items() if d.startswith("GPU") and d != gpu}
        found.cards[gpu] = _nearest({d: w for d, w in ways.items() if d not in found.links}, names)
        found.cpus[gpu], found.numa[gpu] = (*rest[:2], "", "")[:2]
    return found


def _nearest(ways: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """Return the network cards with the shortest PCIe path."""
    order = ("PIX", "PXB", "PHB", "NODE", "SYS")
    cards = {d: w for d, w in ways.items() if not d.startswith("GPU") and w in order}
    best = min((order.index(way) for way in cards.values()), default=0)
    return [names.get(d, d) for d, way in cards.items() if way == order[best]]


def read_nvlinks(text: str) -> dict[str, list[float | None]]:
    """Parse `nvidia-smi nvlink -s`: GB/s of each link of each GPU (by index); None: inactive."""
    found: dict[str, list[float | None]] = {}
    gpu = ""
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = head[1]
            found[gpu] = []
        elif link := re.match(r"\s+Link \d+: (?:([\d.]+) GB/s|<inactive>|.*inactive)", line):
            found[gpu].append(float(link[1]) if link[1] else None)
    return found
