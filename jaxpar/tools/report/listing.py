"""A table of runs: what each has reached, and in which fields its config differs from the others'.

Runs are ranked by bits per byte of held-out text, which do not depend on the tokenizer. Runs whose
data does not say how many bytes its tokens are have held-out losses in nats per token only: these
are ranked among runs with the same tokens and objective, and with no others. A run without any
held-out loss comes last among the runs with its tokens, by training loss.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from jaxpar.config import ConfigError
from jaxpar.config.layers import FIELD, by_address
from jaxpar.config.rules.paths import is_address
from jaxpar.config.serialize import value_text
from jaxpar.runtime import tables
from jaxpar.runtime.stages import stage
from jaxpar.runtime.units import duration
from jaxpar.stores.reading import for_reading, runs_at
from jaxpar.tools.report.drawing import short
from jaxpar.tools.report.elements import e, table
from jaxpar.tools.report.facts import swatch
from jaxpar.tools.report.runs import RunRead, read_run
from jaxpar.tools.report.series import held_out_text

#: How deep below a folder runs are searched.
DEPTH = 3

#: What runs are ranked by if they can be.
BITS = "bits per byte of held-out text"

#: Fields that differ between any two runs, and say nothing.
IGNORED = frozenset({"run.dir", "run.store"})

COLUMNS = (
    *("run", "steps", "loss", "held-out", "bits/byte", "tokens", "tokens/s/device", "time"),
    "differs",
)


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
    tokens_per_second_per_device: float | None
    """The median of its records, as in the report."""
    seconds: float | None
    """Since the run began, pauses between attempts included."""
    differs: dict[str, Any]
    """The fields of its config that not all runs have in common, by path."""
    ranked_by: str
    """"bits per byte", or the tokens and the objective that the held-out loss is of: runs with the
    same are ranked together."""

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
            amount(self.tokens_per_second_per_device),
            "" if self.seconds is None else duration(self.seconds),
            ", ".join(f"{path} {_shown(path, value)}" for path, value in self.differs.items()),
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
    """Return what each run has reached, those ranked together one after another, the best first."""
    configs = [dict(_fields(run.config)) for run in runs]
    by_bits = {held_out_text(run.config) for run in runs if "bits_per_byte" in run.last}
    made = []
    for run, differs in zip(runs, differing_fields(configs), strict=True):
        text = held_out_text(run.config)
        with_bits = text in by_bits and _number(run.last.get("held_out_loss")) is None
        ranked_by = BITS if with_bits or "bits_per_byte" in run.last else text
        made.append((text, _summary(run, differs, ranked_by)))
    return [summary for _, summary in sorted(made, key=lambda item: _rank(*item))]


def together(shown: Iterable[Summary]) -> dict[str, list[Summary]]:
    """Return the runs that are ranked together, by what they are ranked by."""
    made: dict[str, list[Summary]] = {}
    for summary in shown:
        made.setdefault(summary.ranked_by, []).append(summary)
    return made


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
    made = e("section", e("h2", "Runs"), table(names, rows, text_last=names[-1] == "differs"))
    if len(groups := together(shown)) > 1:
        for by, ranked in groups.items():
            made.append(e("p", heading(by, ranked), class_="note"))
    return made


def heading(by: str, ranked: Sequence[Summary]) -> str:
    """Describe the runs that are ranked together."""
    scored = any(summary.held_out_loss is not None for summary in ranked)
    what = by if by == BITS else f"{'held-out' if scored else 'training'} loss on {by}"
    return f"ranked by {what}: {', '.join(summary.name for summary in ranked)}"


def used_columns(shown: Sequence[Summary]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns in which some run has a value: their names, and the rows."""
    rows = [summary.cells() for summary in shown]
    used = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
    return [COLUMNS[i] for i in used], [[row[i] for i in used] for row in rows]


def _fields(config: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for section, fields in config.items():
        for name, value in (fields or {}).items():
            path = f"{section}.{name}"
            yield from by_address(value).items() if path == FIELD else [(path, value)]


def _shown(path: str, value: Any) -> str:
    return value_text(path, value) or "''"


def _summary(run: RunRead, differs: dict[str, Any], ranked_by: str) -> Summary:
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
        tokens_per_second_per_device=run.speed.throughput,
        seconds=spent,
        differs=differs,
        ranked_by=ranked_by,
    )


def _rank(text: str, summary: Summary) -> tuple[bool, str, float, str, float, str]:
    """Return the key of a run's place. Training losses are compared only on the same tokens."""
    bits = summary.ranked_by == BITS
    score = _number(summary.bits_per_byte if bits else summary.held_out_loss)
    of = lambda value: math.inf if value is None else value  # noqa: E731
    group = "" if bits else text
    return not bits, group, of(score), text, of(_number(summary.loss)), summary.name


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


# ------------------------------------------------------------------ The table of runs in a terminal


def found_runs(folders: Sequence[str]) -> list[RunRead]:
    """Read the runs in the folders. One that cannot be read is named on a line, and left out.

    Raises:   ConfigError if a folder does not exist, or there is no run in any.
    """
    places: dict[str, None] = {}
    for name in folders:
        if is_address(name):
            places |= dict.fromkeys(runs_at("FOLDER", name, DEPTH))
            continue
        if not Path(name).is_dir():
            fix = "give a folder with runs, such as runs"
            raise ConfigError("FOLDER", name, "is not a folder", fix)
        places |= dict.fromkeys(map(str, find_runs(Path(name), _leave_out)))
    runs = []
    for place in places:
        try:
            with stage(f"reading {place}"):
                runs.append(_read(place))
        except ConfigError as error:
            print(f"left out   {error}", file=sys.stderr)
    if not runs:
        rule = f"has no run in it, up to {DEPTH} folders deep"
        raise ConfigError(
            "FOLDER", " ".join(folders), rule, "train one: python -m jaxpar.train quickstart"
        )
    return runs


def _leave_out(folder: Path, error: OSError) -> None:
    print(f"left out   {folder} cannot be read: {error.strerror}", file=sys.stderr)


def _read(place: str) -> RunRead:
    """Read a run in a folder, or a copy of one at an address, without its checkpoints."""
    if not is_address(place):
        return read_run(place)
    folder = for_reading("FOLDER", place, lambda line: None, checkpoints=False)
    return replace(read_run(str(folder)), name=place)


def lines(shown: Sequence[Summary]) -> list[str]:
    """Return the table, with a second line per run for what differs: it is often long."""
    names, rows = used_columns(shown)
    differs = [row.pop() if names[-1] == "differs" else "" for row in rows]
    names = [name for name in names if name != "differs"]
    head, *of_runs = tables.lines([names, *rows])
    made = [head]
    for row, more in zip(of_runs, differs, strict=True):
        made += [row, *([f"    {more}"] if more else [])]
    groups = together(shown)
    if len(groups) > 1:
        made += ["", "These do not compare: they have other tokens or another objective."]
        made += [heading(by, ranked) for by, ranked in groups.items()]
    return made
