"""Compares the figures of several cards, with ratios to the first card."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.runtime.tables import indented
from jaxpar.tools.bench.cards.differences import one_line
from jaxpar.tools.profiling.trace.kernels import CLASSES, KINDS

type Card = dict[str, Any]

MISSING = "-"
#: Marks a ratio whose difference is within the spread of the measurements.
NOISE = "~"


@dataclass(frozen=True)
class CardFigure:
    """A figure of a training card: its path and format.

    `timed`: it is derived from the median step time, whose spread is known.
    """

    label: str
    path: str
    form: str = ",.1f"
    scale: float = 1.0
    timed: bool = False


TRAINING = (
    CardFigure("tokens/s/device", "tokens_per_second_per_device", ",.0f", timed=True),
    CardFigure("MFU, causal", "mfu_causal", ".1%", timed=True),
    CardFigure("MFU, full attention", "mfu_full_attention", ".1%", timed=True),
    CardFigure("step, median ms", "step_seconds/median", scale=1e3, timed=True),
    CardFigure("  fastest", "step_seconds/fastest", scale=1e3),
    CardFigure("  slowest", "step_seconds/slowest", scale=1e3),
    CardFigure("  interquartile", "step_seconds/interquartile", scale=1e3),
    CardFigure("outer steps ms", "outer_steps/outer_step_seconds", scale=1e3),
    CardFigure("data wait ms", "data_wait_seconds/median", scale=1e3),
    CardFigure("peak GiB", "peak_memory_gib"),
    CardFigure("watts per GPU", "power/watts", ",.0f"),
    CardFigure("SM MHz", "power/sm_mhz", ",.0f"),
    CardFigure("at the power limit", "power/at_power_limit", ".0%"),
    CardFigure("compilation s", "compile_seconds"),
    CardFigure("loss, first step", "loss/first", ".4f"),
    CardFigure("loss, last step", "loss/last", ".4f"),
    CardFigure("fullest expert", "experts/fullest_expert/median", ".2f"),
    CardFigure("fullest rank", "experts/fullest_rank/median", ".2f"),
    CardFigure("  mean of layers", "experts/fullest_rank_mean/median", ".2f"),
    CardFigure("further rounds", "experts/further_rounds/median"),
    CardFigure("GB sent per step", "collective_bytes/bytes", ",.3f", 1e-9),
    CardFigure("profiled step ms", "profile/ms/step"),
    CardFigure("  compute", "profile/ms/compute"),
    CardFigure("  communication", "profile/ms/communication"),
    CardFigure("  exposed", "profile/ms/exposed"),
    CardFigure("  exposed, worst device", "profile/worst_device_ms/exposed"),
    CardFigure("  idle", "profile/ms/idle"),
    *(CardFigure(f"kernels: {what} ms", f"profile/by_class/{what}/ms") for what in CLASSES),
    *(
        CardFigure(f"exposed: {kind} ms", f"profile/communication/{kind}/exposed_ms")
        for kind in KINDS
    ),
)


def at(card: Card, path: str) -> Any:
    """Return a card's value at a path of keys, key/key; None if missing."""
    value: Any = card
    for key in path.split("/"):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number_at(card: Card, path: str) -> float | None:
    """Return a card's value at a path if it is a plausible number."""
    value = at(card, path)
    return value if _is_figure(value) else None


def _is_figure(value: Any) -> bool:
    """Return whether a value is a finite number and at least 0, up to rounding."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value > -1e-6
    except OverflowError:  # an integer beyond all floats
        return False


def left_out(where: str, card: Card, paths: Sequence[str]) -> list[str]:
    """Return a note on each value that is not a number."""
    odd = [(path, at(card, path)) for path in paths]
    return [
        f"note: {path} of {where} is not a number and was skipped: {one_line(value)[:40]}"
        for path, value in odd
        if value is not None and not _is_figure(value)
    ]


def ratio(value: float | None, first: float | None, noise: bool = False) -> str:
    """Format the ratio to the first card, marked if the difference is within the spread."""
    if value is None or not first:
        return MISSING
    return f"{value / first:.3f}" + (NOISE if noise else "")


def training_table(names: Sequence[str], cards: Sequence[Card]) -> tuple[str, list[str]]:
    """Format the figures of any card, with notes on differences within the spread."""
    first = cards[0]
    noisy = [_step_noise(card, first) for card in cards]
    rows = [("", names[0], *(c for n in names[1:] for c in (n, f"{n}/{names[0]}")))]
    for figure in TRAINING:
        values = [number_at(card, figure.path) for card in cards]
        if not any(value is not None for value in values):
            continue
        texts = [_written(value, figure) for value in values]
        cells = [texts[0]]
        for value, text, within in zip(values[1:], texts[1:], noisy[1:], strict=True):
            cells += [text, ratio(value, values[0], figure.timed and within is not None)]
        rows.append((figure.label, *cells))
    notes = [
        f"noise: the steps of {names[0]} and {name} differ by {within[0] * 1e3:.1f} ms, within the "
        f"spread of {within[1] * 1e3:.1f} ms between steps ({NOISE})"
        for name, within in zip(names[1:], noisy[1:], strict=True)
        if within is not None
    ]
    paths = [figure.path for figure in TRAINING]
    for name, card in zip(names, cards, strict=True):
        notes += left_out(name, card, paths)
    return indented(rows), notes


def _written(value: float | None, figure: CardFigure) -> str:
    return MISSING if value is None else format(value * figure.scale, figure.form)


def _step_noise(card: Card, first: Card) -> tuple[float, float] | None:
    """Return the difference of the median steps and the spread in s; None if it is significant.

    The spread is the larger interquartile range. For older cards without it, it is the distance
    between the fastest and the slowest step.
    """
    median, its_median = (number_at(c, "step_seconds/median") for c in (card, first))
    spread, its_spread = (_step_spread(c) for c in (card, first))
    if median is None or its_median is None or spread is None or its_spread is None:
        return None
    difference, widest = abs(median - its_median), max(spread, its_spread)
    return (difference, widest) if difference <= widest else None


def _step_spread(card: Card) -> float | None:
    middle = number_at(card, "step_seconds/interquartile")
    slowest, fastest = (number_at(card, f"step_seconds/{end}") for end in ("slowest", "fastest"))
    if middle is None and slowest is not None and fastest is not None:
        return slowest - fastest
    return middle
