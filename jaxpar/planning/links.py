"""What each way to sum gradients over replicas would gain, by the speed of the link between them.

The time of a step without that sum is predicted as before. The sum is added whole, as if nothing
hid it: it takes the gradients of all layers together, at the end of the backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from jaxpar.config import Config, replace
from jaxpar.planning.layouts import describe
from jaxpar.planning.predict.communication import (
    Cluster,
    compression_seconds,
    sent_over_replicas,
)
from jaxpar.planning.predict.hardware import network_of_speed
from jaxpar.planning.predict.time import step_time
from jaxpar.planning.ranking import Layout
from jaxpar.runtime.tables import titled

#: Speeds of the link, Gbit/s per GPU and direction.
SPEEDS = (400.0, 100.0, 10.0)

#: Steps between two outer steps of the row of DiLoCo.
OUTER_STEPS = 50

METHODS = ("float32", "bfloat16", "int8", "top_k")


@dataclass(frozen=True)
class LinkRow:
    """A method: the bytes that a GPU sends in a step, and the seconds of a step by link speed."""

    method: str
    sent: float
    seconds: tuple[float, ...]


def with_replicas(layouts: Sequence[Layout]) -> Layout | None:
    """Return the first layout that has replicas; None if there is none."""
    return next((one for one in layouts if one.cfg.parallel.replica > 1), None)


def rows_of(layout: Layout, cluster: Cluster) -> list[LinkRow]:
    """Predict a step of a layout with each method, for each speed of the link."""
    base = replace(layout.cfg, **{"parallel.replica_reduction": "float32", "diloco.every": 0})
    time = step_time(base, cluster)
    alone = time.total - time.exposed.get("replica", 0.0)
    rows = [_row(base, method, alone, cluster) for method in METHODS]
    sent = rows[0].sent / OUTER_STEPS
    seconds = tuple(alone + sent / _bandwidth(speed) for speed in SPEEDS)
    return [*rows, LinkRow(f"diloco, every {OUTER_STEPS}", sent, seconds)]


def _row(base: Config, method: str, alone: float, cluster: Cluster) -> LinkRow:
    cfg = replace(base, **{"parallel.replica_reduction": method})
    sent = sent_over_replicas(cfg)
    alone += compression_seconds(cfg, cluster.gpu)
    return LinkRow(method, sent, tuple(alone + sent / _bandwidth(speed) for speed in SPEEDS))


def _bandwidth(gigabits: float) -> float:
    return network_of_speed("link", gigabits).bandwidth.value


def show(console: Console, layout: Layout, rows: Sequence[LinkRow]) -> None:
    """Print the table of a layout."""
    columns = ["parallel.replica_reduction", "MB", *(f"{speed:g} Gbit/s" for speed in SPEEDS)]
    cells = [
        (row.method, f"{row.sent / 1e6:,.1f}", *(f"{seconds:.3f}" for seconds in row.seconds))
        for row in rows
    ]
    title = f"Sum of gradients over replicas ({describe(layout.cfg)}): MB that a GPU sends in a "
    title += "step, and\nseconds of a step by the speed of the link between replicas, per GPU"
    console.print(titled(title, columns, cells))
