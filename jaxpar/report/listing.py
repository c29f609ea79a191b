"""A table of runs: what each has reached, and in which fields its config differs from the others'.

The runs with the lowest held-out loss come first; those without any follow, by loss.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from jaxpar.charts.elements import e, table
from jaxpar.charts.scale import seconds, short
from jaxpar.report.facts import swatch
from jaxpar.report.runs import RunRead

#: How deep below a folder runs are searched.
DEPTH = 3

#: Fields that differ between any two runs, and say nothing.
IGNORED = frozenset({"run.dir", "run.store"})

COLUMNS = ("run", "steps", "loss", "held-out", "bits/byte", "tokens", "tokens/s", "time", "differs")


@dataclass(frozen=True)
class Summary:
    """What a run has reached. Values that it does not have are None."""

    name: str
    step: int
    num_steps: int
    """0 if unknown."""
    loss: float | None
    """Smoothed, as in the report."""
    held_out_loss: float | None
    bits_per_byte: float | None
    tokens: float | None
    tokens_per_second: float | None
    """Of all devices."""
    seconds: float | None
    """Since the run began, pauses between attempts included."""
    differs: dict[str, Any]
    """The fields of its config that not all runs have in common, by path."""

    def cells(self) -> list[str]:
        """Return the texts of COLUMNS."""
        number = lambda value, form: "" if value is None else format(value, form)  # noqa: E731
        amount = lambda value: "" if value is None else short(value)  # noqa: E731
        of = f"/{self.num_steps:,}" if self.num_steps else ""
        return [
            self.name,
            f"{self.step:,}{of}",
            number(self.loss, ".4f"),
            number(self.held_out_loss, ".4f"),
            number(self.bits_per_byte, ".4f"),
            amount(self.tokens),
            amount(self.tokens_per_second),
            "" if self.seconds is None else seconds(self.seconds),
            ", ".join(f"{path} {value}" for path, value in self.differs.items()),
        ]


def find_runs(
    folder: Path, leave_out: Callable[[Path, OSError], None], depth: int = DEPTH
) -> Iterator[Path]:
    """Yield the folders of runs in a folder, itself included, in order of their names.

    Args:     leave_out: called with a folder that cannot be read.
    """
    try:
        is_run = all((folder / name).is_file() for name in ("metrics.jsonl", "config.json"))
        children = sorted(p for p in folder.iterdir() if p.is_dir()) if not is_run and depth else []
    except OSError as error:
        return leave_out(folder, error)
    if is_run:
        yield folder
    for child in children:
        yield from find_runs(child, leave_out, depth - 1)


def summaries(runs: Sequence[RunRead]) -> list[Summary]:
    """Return what each run has reached, the best one first."""
    configs = [dict(_fields(run.config)) for run in runs]
    made = [
        _summary(run, differs) for run, differs in zip(runs, differing_fields(configs), strict=True)
    ]
    return sorted(made, key=_rank)


def differing_fields(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each config the fields in which not all of them agree. A field that a config does
    not have has no value there."""
    paths = list(dict.fromkeys(path for config in configs for path in config))
    values = {path: [config.get(path) for config in configs] for path in paths}
    apart = [path for path, found in values.items() if any(v != found[0] for v in found)]
    apart = [path for path in apart if path not in IGNORED]
    return [{path: config[path] for path in apart if path in config} for config in configs]


def html_table(runs: Sequence[RunRead]) -> Element:
    """Return the table as a section of the report."""
    names, rows = used_columns(shown := summaries(runs))
    signs = {run.name: swatch(index) for index, run in enumerate(runs)}
    for row, summary in zip(rows, shown, strict=True):
        row[0] = e("span", signs[summary.name], f" {summary.name}")
    return e("section", e("h2", "Runs"), table(names, rows, text_last=names[-1] == "differs"))


def used_columns(shown: Sequence[Summary]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns in which some run has a value: their names, and the rows."""
    rows = [summary.cells() for summary in shown]
    used = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
    return [COLUMNS[i] for i in used], [[row[i] for i in used] for row in rows]


def _fields(config: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for section, fields in config.items():
        yield from ((f"{section}.{name}", value) for name, value in fields.items())


def _summary(run: RunRead, differs: dict[str, Any]) -> Summary:
    last = run.last
    loss = run.series["loss"].points()[-1].smooth if "loss" in run.series else None
    spent = run.goodput.total if run.goodput is not None and run.goodput.total else None
    return Summary(
        name=run.name,
        step=run.last_step,
        num_steps=run.num_steps,
        loss=loss,
        held_out_loss=last.get("held_out_loss"),
        bits_per_byte=last.get("bits_per_byte"),
        tokens=last.get("tokens_seen"),
        tokens_per_second=last.get("tokens_per_second"),
        seconds=spent,
        differs=differs,
    )


def _rank(summary: Summary) -> tuple[float, float, str]:
    of = lambda value: math.inf if value is None or math.isnan(value) else value  # noqa: E731
    return of(summary.held_out_loss), of(summary.loss), summary.name
