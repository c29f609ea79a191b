"""Pictures of the notebooks: devices and shards, collectives, pipeline schedules."""

from collections.abc import Callable, Sequence

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

plt.rcParams |= {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}

#: One colour for each of up to 16 devices, stages or microbatches.
COLOURS = [plt.get_cmap("tab20")(i) for i in (0, 2, 4, 6, 8, 10, 12, 16, 1, 3, 5, 7, 9, 11, 13, 17)]


def colour(i: int) -> tuple:
    """The colour of device, stage or microbatch i."""
    return COLOURS[i % len(COLOURS)]


def paler(face: tuple) -> tuple:
    """A colour half way to white, for what a text stands on."""
    return tuple(0.5 + 0.5 * part for part in face[:3])


def box(axes: Axes, x: float, y: float, w: float, h: float, face, text: str, **style) -> None:
    """A filled rectangle with a centred text."""
    axes.add_patch(Rectangle((x, y), w, h, facecolor=face, edgecolor="white", linewidth=1.2))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", **({"size": 8} | style))


def bare(axes: Axes, width: float, height: float, title: str = "") -> None:
    """Axes of given extent without ticks; y grows downward."""
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], title=title)
    axes.spines[:].set_visible(False)


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Ticks of a logarithmic axis at these values only, written without powers of ten."""
    axis.set_ticks(values, [f"{value:,g}" if value < 1 else f"{value:,.0f}" for value in values])
    axis.set_minor_locator(NullLocator())


# ------------------------------------------------------------------------------------- shards


def draw_shards(axes: Axes, array: jax.Array, title: str, numbers: bool = False) -> None:
    """Which device holds which part of a matrix; a part on several devices names them all."""
    rows, columns = array.shape
    holders: dict[tuple[int, int, int, int], list[int]] = {}
    for shard in array.addressable_shards:
        (top, bottom, _), (left, right, _) = (
            part.indices(size) for part, size in zip(shard.index, array.shape, strict=True)
        )
        holders.setdefault((top, bottom, left, right), []).append(shard.device.id)
    bare(axes, columns, rows, title)
    for (top, bottom, left, right), devices in holders.items():
        name = ", ".join(map(str, devices)) if len(devices) < 8 else f"{len(devices)} devices"
        text = "" if numbers else name
        box(axes, left, top, right - left, bottom - top, paler(colour(devices[0])), text)
    if numbers:
        for (i, j), value in np.ndenumerate(np.asarray(array)):
            axes.text(j + 0.5, i + 0.5, f"{value:g}", ha="center", va="center", size=7)


def draw_devices(mesh: jax.sharding.Mesh) -> None:
    """The devices at their places: the last axis to the right, those before it side by side."""
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    *outer, across = sizes
    grid = mesh.devices.reshape(tuple(sizes.values()))
    figure, axes = plt.subplots(figsize=(7, 1.9))
    bare(axes, 9, 3.1)
    x = 0.6
    for index in np.ndindex(grid.shape[:-2]):
        block = grid[index]
        named = ", ".join(f"{a} {i}" for a, i in zip(outer[:-1], index, strict=True))
        axes.text(x + block.shape[1] * 0.8, 0.35, named, ha="center", weight="bold")
        for i, j in np.ndindex(block.shape):
            device = block[i, j].id
            box(axes, x + 1.6 * j, 0.6 + i, 1.6, 1, paler(colour(device)), f"device {device}")
        for i in range(block.shape[0]):
            axes.text(x - 0.1, 1.1 + i, f"{outer[-1]} {i}", ha="right", va="center", size=8)
        for j in range(block.shape[1]):
            axes.text(x + 1.6 * j + 0.8, 2.85, f"{across} {j}", ha="center", va="center", size=8)
        x += 1.6 * block.shape[1] + 1.4
    plt.show()


# -------------------------------------------------------------------------------- collectives


def draw_collective(
    name: str, before: np.ndarray, after: np.ndarray, origin: Callable[[float], int | None]
) -> None:
    """What each device holds before and after a collective.

    Args:     before, after: [devices, entries]. origin: the device that an entry came from, for
              its colour; None for a sum over devices, which is grey.
    """
    figure, both = plt.subplots(1, 2, figsize=(7, 0.5 + 0.2 * max(before.shape[1], after.shape[1])))
    for axes, held, when in zip(both, (before, after), ("before", "after"), strict=True):
        devices, entries = held.shape
        bare(axes, devices * 1.2 + 0.4, max(before.shape[1], after.shape[1]) + 0.9)
        for d in range(devices):
            axes.text(1.2 * d + 0.5, 0.4, f"device {d}", ha="center", va="center", size=8)
            for i in range(entries):
                source = origin(held[d, i])
                face = "0.85" if source is None else paler(colour(source))
                box(axes, 1.2 * d, 0.9 + i, 1.0, 1, face, f"{held[d, i]:g}", size=7)
        axes.set_title(f"{name}: {when}", size=9)
    plt.show()


# ----------------------------------------------------------------------------------- pipeline


def draw_schedule(
    axes: Axes, rows: Sequence[tuple[Sequence[tuple], Sequence[tuple]]], title: str
) -> None:
    """A pipeline's slots: of each stage, forwards above and backwards below.

    Args:     rows: of each stage (forwards, backwards): (tick, microbatch, chunk) of each unit.
    """
    last = max(unit[0] for row in rows for units in row for unit in units)
    bare(axes, last + 1, 2.3 * len(rows), title)
    for stage, row in enumerate(rows):
        top = 2.3 * stage
        axes.add_patch(Rectangle((0, top), last + 1, 2, facecolor="0.93"))
        axes.text(-0.3, top + 1, f"stage {stage}", ha="right", va="center", size=8)
        for kind, units in enumerate(row):
            for tick, microbatch, chunk in units:
                shade = {"size": 7, "color": "white" if kind else "black"}
                face = colour(microbatch) if kind else paler(colour(microbatch))
                box(axes, tick, top + kind, 1, 1, face, f"{microbatch}{'′' * chunk}", **shade)
