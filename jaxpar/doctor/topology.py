"""How a host's GPUs are connected, from `nvidia-smi`: by NVLink or PCIe."""

import re

#: Colors and underlines, which `nvidia-smi topo -m` writes even to a pipe.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def read_links(text: str) -> dict[str, dict[str, str]]:
    """Parse the output of `nvidia-smi topo -m`.

    Returns:  the connection of each pair of GPUs: "NV18" (18 NVLinks), or PCIe: "PIX", "PXB",
              "PHB", "NODE", "SYS", from a single bridge to across sockets.
    Raises:   ValueError if the text has no table.
    """
    lines = _ESCAPES.sub("", text).splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b", line)]
    if not heads:
        raise ValueError("no table of GPUs in the output of `nvidia-smi topo -m`")
    columns = [c.strip() for c in re.split(r"\t+|\s{2,}", lines[heads[0]].strip())]
    gpus = [c for c in columns if re.fullmatch(r"GPU\d+", c)]
    found = {}
    for line in lines[heads[0] + 1 :]:
        words = line.split()
        if words and words[0] in gpus:
            ways = zip(gpus, words[1:], strict=False)
            found[words[0]] = {gpu: way for gpu, way in ways if gpu != words[0]}
    return found


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
