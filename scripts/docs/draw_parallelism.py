"""Draws the pictures of docs/parallelism.md: python scripts/docs/draw_parallelism.py [--write]

What a device holds is from the tables that training uses: `axes.partition_spec`, `BATCH_SPEC`
and the order of tokens. Prints the names of the files that would change; --write writes them into
docs/pictures.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from jaxpar.config import ParallelConfig
from jaxpar.parallel.context import token_order
from jaxpar.sharding.axes import AXES, BATCH_SPEC, partition_spec

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"

#: Devices on the axis of a picture; rows and positions of its batch; layers, D and F of its weight.
WAYS, ROWS, POSITIONS, LAYERS, WIDTH, FEED = 4, 4, 8, 4, 4, 4

#: Logical axes of the weight drawn: up, of the feed-forward.
WEIGHT = ("layer", "embed", "mlp")

STYLE = """
  .ground{fill:#fcfcfd;stroke:#d5d9e0} .panel{fill:#f1f3f7;stroke:#c5cbd6}
  .none{fill:#fff;stroke:#cfd5df} .held{fill:#3f63c9;stroke:#2c4aa0} .moment{fill:#f0b35a;
  stroke:#c98a2c} text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif;font-size:12px;
  fill:#20262f} .small{font-size:11px;fill:#4a5362} .line{stroke:#4a5362;stroke-width:1.4;
  fill:none} .tip{fill:#4a5362}
  @media (prefers-color-scheme:dark){ .ground{fill:#1b2028;stroke:#39414e}
  .panel{fill:#262d38;stroke:#46505f} .none{fill:#161a21;stroke:#46505f} .held{fill:#6f8fe8;
  stroke:#9db3f2} .moment{fill:#c98a2c;stroke:#f0b35a} text{fill:#e8ebf0} .small{fill:#b6beca}
  .line{stroke:#b6beca} .tip{fill:#b6beca} }
"""


@dataclass(frozen=True)
class Message:
    """A line under the devices. to: "all" of the axis, the "next" device, or "back"."""

    to: str
    text: str


@dataclass(frozen=True)
class Picture:
    """One axis. gathered: the layer whose weights are whole for a moment; stream: tokens are
    split further between blocks."""

    axis: str
    title: str
    messages: tuple[Message, ...]
    gathered: int | None = None
    stream: bool = False


PICTURES = (
    Picture(
        "data",
        "data = 4, or expert = 4: rows of the batch and weights are split (ZeRO-3)",
        (
            Message("all", "all-gather of a layer's weights before its use, forward and backward"),
            Message("all", "all-to-all of its gradient, added up where it belongs"),
        ),
        gathered=1,
    ),
    Picture(
        "replica",
        "replica = 4: rows of the batch are split, weights are not",
        (Message("all", "all-reduce of the gradients, once a step"),),
    ),
    Picture(
        "sequence",
        "sequence = 4: positions are split, in zigzag order, and weights as over data",
        (
            Message("all", "keys and values of a layer, forward and backward"),
            Message("all", "weights and gradients, as over data"),
        ),
        gathered=1,
    ),
    Picture(
        "tensor",
        "tensor = 4: heads and feed-forward are split; positions between blocks",
        (
            Message("all", "gather of the positions before attention, and before the feed-forward"),
            Message("all", "reduce-scatter of the partial sums after each"),
        ),
        stream=True,
    ),
    Picture(
        "pipeline",
        "pipeline = 4: layers are split; microbatches pass through, here at tick 3",
        (
            Message("next", "activations to the next stage, each tick"),
            Message("back", "gradients to the stage before, each tick"),
        ),
    ),
)


# ------------------------------------------------------------------------------ who holds what


def part(axis: str, names: object, device: int, size: int) -> set[int]:
    """Return the indices of a dimension sharded over `names` that a device of `axis` holds.

    Args:     names: an entry of a PartitionSpec. size: size of the dimension.
    """
    split = axis == names or (isinstance(names, tuple) and axis in names)
    if not split:
        return set(range(size))
    each = size // WAYS
    return set(range(device * each, (device + 1) * each))


def held_tokens(axis: str, device: int) -> set[tuple[int, int]]:
    """Return (row, position in the text) of a device's tokens."""
    rows, columns = (
        part(axis, names, device, n) for names, n in zip(BATCH_SPEC, (ROWS, POSITIONS), strict=True)
    )
    order = token_order(ParallelConfig(**{axis: WAYS}), POSITIONS)
    if order is not None:
        columns = {int(order[column]) for column in columns}
    return {(row, column) for row in rows for column in columns}


def held_weights(axis: str, device: int) -> set[tuple[int, int, int]]:
    """Return (layer, row, column) of a device's shard of the weight."""
    spec = partition_spec(WEIGHT)
    parts = (
        part(axis, names, device, n) for names, n in zip(spec, (LAYERS, WIDTH, FEED), strict=True)
    )
    layers, rows, columns = parts
    return {(layer, d, f) for layer in layers for d in rows for f in columns}


def token_class(picture: Picture, device: int, row: int, position: int) -> str:
    """How a token is drawn: held, held for a moment, or not there."""
    if picture.axis == "pipeline":  # row is a microbatch; the last stage has the earliest
        at_work = WAYS - 1 - device
        return "held" if row == at_work else "moment" if row < at_work else "none"
    if (row, position) not in held_tokens(picture.axis, device):
        return "none"
    own = position // (POSITIONS // WAYS) == device
    return "moment" if picture.stream and not own else "held"


# ------------------------------------------------------------------------------------- drawing

CELL, PANEL, GAP, LEFT, TOP = 13, 150, 22, 16, 44


def cells(x: float, y: float, classes: Sequence[Sequence[str]], size: int) -> list[str]:
    """Draw a grid of squares, with one path per class."""
    squares: dict[str, str] = {}
    for j, line in enumerate(classes):
        for i, name in enumerate(line):
            square = f"M{x + i * size:g} {y + j * size:g}h{size}v{size}h-{size}z"
            squares[name] = squares.get(name, "") + square
    ordered = sorted(squares, key="none moment held".split().index)  # darker borders on top
    return [f'<path class="{name}" d="{squares[name]}"/>' for name in ordered]


def words(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    """Return a line of text as SVG."""
    style = f' class="{name}"' if name else ""
    return f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def panel(picture: Picture, device: int) -> list[str]:
    """Draw a device: its tokens and its shard of the weights."""
    x = LEFT + device * (PANEL + GAP)
    out = [f'<rect class="panel" x="{x}" y="{TOP}" width="{PANEL}" height="176" rx="6"/>']
    name = "stage" if picture.axis == "pipeline" else "device"
    out.append(words(x + 10, TOP + 19, f"{name} {device}"))
    rows = "microbatches" if picture.axis == "pipeline" else "rows × positions"
    out.append(words(x + 10, TOP + 40, rows, "small"))
    tokens = [
        [token_class(picture, device, row, position) for position in range(POSITIONS)]
        for row in range(ROWS)
    ]
    out += cells(x + 10, TOP + 47, tokens, CELL)
    out.append(words(x + 10, TOP + 119, "weights, by layer", "small"))
    kept = held_weights(picture.axis, device)
    for layer in range(LAYERS):
        whole = "moment" if layer == picture.gathered else "none"
        grid = [
            ["held" if (layer, d, f) in kept else whole for f in range(FEED)] for d in range(WIDTH)
        ]
        out += cells(x + 10 + layer * 34, TOP + 128, grid, 7)
        out.append(words(x + 24 + layer * 34, TOP + 170, str(layer), "small", "middle"))
    return out


def tip(x: float, y: float, way: int) -> str:
    """An arrow's head at a point, to the right (1) or to the left (-1)."""
    return f'<path class="tip" d="M{x:g} {y:g}l{-7 * way} -4v8z"/>'


def message(found: Message, y: float) -> list[str]:
    """Draw the arrows between devices and what they send."""
    out = []
    centers = [LEFT + PANEL / 2 + device * (PANEL + GAP) for device in range(WAYS)]
    for left, right in itertools.pairwise(centers):
        out.append(f'<path class="line" d="M{left + 8:g} {y:g}H{right - 8:g}"/>')
        out += [tip(right - 5, y, 1)] if found.to in ("all", "next") else []
        out += [tip(left + 5, y, -1)] if found.to in ("all", "back") else []
    out += [f'<circle class="tip" cx="{x:g}" cy="{y:g}" r="2.6"/>' for x in centers]
    out.append(words((centers[0] + centers[-1]) / 2, y + 18, found.text, "small", "middle"))
    return out


def legend(y: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    """Draw the legend of the colors."""
    out, x = [], float(LEFT)
    for name, text in entries:
        out += [*cells(x, y - 10, [[name]], 11), words(x + 17, y, text, "small")]
        x += 36 + 6.2 * len(text)
    return out


def legend_of(picture: Picture) -> list[tuple[str, str]]:
    """Return the colors in a picture."""
    entries = [("held", "held"), ("none", "not there")]
    if picture.stream:
        return [*entries, ("moment", "gathered inside a block")]
    if picture.gathered is not None:
        return [*entries, ("moment", "gathered while the layer is computed")]
    if picture.axis == "pipeline":
        at_work = [("held", "held; the microbatch at work"), ("none", "not there")]
        return [*at_work, ("moment", "waits for its backward")]
    return entries


def svg(width: float, height: float, title: str, body: list[str]) -> str:
    """A file. Its ground is drawn, so that it reads on any page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">'
    )
    ground = f'<rect class="ground" x="1" y="1" width="{width - 2:g}" height="{height - 2:g}" '
    lines = [
        head,
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        ground + 'rx="8"/>',
    ]
    return "\n".join([*lines, *body, "</svg>"]) + "\n"


def draw(picture: Picture) -> str:
    """The picture of an axis."""
    width = 2 * LEFT + WAYS * PANEL + (WAYS - 1) * GAP
    body = [words(LEFT, 27, picture.title)]
    for device in range(WAYS):
        body += panel(picture, device)
    y = TOP + 196
    for found in picture.messages:
        body += message(found, y)
        y += 40
    body += legend(y + 2, legend_of(picture))
    return svg(width, y + 18, picture.title, body)


def draw_mesh() -> str:
    """Sixteen devices in two hosts, by their place on three axes: the innermost are neighbors."""
    sizes = {"pipeline": 2, "data": 2, "tensor": 4}
    devices = np.arange(16).reshape([sizes.get(axis, 1) for axis in AXES])
    title = "pipeline = 2, data = 2, tensor = 4 over two hosts of eight GPUs"
    body = [words(LEFT, 27, title)]
    for stage, host in enumerate(devices.reshape(2, 2, 4)):
        x = LEFT + stage * 342
        body.append(f'<rect class="panel" x="{x}" y="{TOP}" width="328" height="160" rx="6"/>')
        body.append(words(x + 12, TOP + 19, f"host {stage}: pipeline {stage}"))
        for shard, group in enumerate(host):
            y = TOP + 34 + shard * 62
            body.append(words(x + 12, y + 29, f"data {shard}", "small"))
            for rank, device in enumerate(group):
                left = x + 62 + rank * 64
                name = "held" if shard == 0 else "moment"
                body.append(
                    f'<rect class="{name}" x="{left}" y="{y}" width="56" height="46" rx="4" '
                    'fill-opacity="0.28"/>'
                )
                body.append(words(left + 28, y + 20, f"GPU {device}", "", "middle"))
                body.append(words(left + 28, y + 36, f"tensor {rank}", "small", "middle"))
    told = (
        "tensor, within a row: activations, in every layer",
        "data, between the rows of a host: weights and gradients, layer by layer",
        "pipeline, between the hosts: activations of a stage, once a tick",
    )
    for line, text in enumerate(told):
        body.append(words(LEFT, TOP + 182 + 18 * line, text, "small"))
    return svg(2 * LEFT + 670, TOP + 234, title, body)


def files() -> dict[str, str]:
    """Every picture, by its file's name."""
    return {f"{p.axis}.svg": draw(p) for p in PICTURES} | {"mesh.svg": draw_mesh()}


def main() -> None:
    """Name the files that would change, or write them."""
    for name, text in files().items():
        path = FOLDER / name
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        if sys.argv[1:] == ["--write"]:
            path.write_text(text, "utf-8")
        print(name)


if __name__ == "__main__":
    main()
