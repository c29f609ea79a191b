"""Cards of --bench: read, and compared side by side: figures, then the conditions that differ."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError
from jaxpar.config.layers import FIELD, by_address
from jaxpar.runtime.tables import indented
from jaxpar.tools.profiling.trace.kernels import CLASSES, KINDS

# ------------- Finds the conditions that differ between cards: GPU, versions, flags, commit, config


type Card = dict[str, Any]

MISSING = "-"

#: Entries of a card that are conditions.
PLAIN = (
    *("host", "device", "processes", "platform", "jaxpar", "jax", "jaxlib", "cudnn", "commit"),
    *("mesh", "attention", "steps", "repeats"),
)
#: Fields of a card's line about a GPU.
GPU = ("gpu", "driver", "power limit")

#: Conditions that must agree for figures to be comparable; so must the model and these fields.
ALIKE = ("gpu", "device")
ALIKE_CONFIG = ("config.data.seq_len",)
#: The sections of the config that decide what a step computes.
MODEL = ("config.model.", "config.compute.")
#: Fields of them that only select an implementation.
CHOICES = (
    "config.compute.attention_backend",
    "config.compute.attention_deterministic",
    "config.compute.recurrent_backend",
)


def one_line(value: Any) -> str:
    """Format a value from a file as a printable line."""
    text = str(value)
    return text if text.isprintable() else ascii(text)[1:-1]


def conditions(card: Card) -> dict[str, str]:
    """Return a card's conditions by name: section.field, and one entry per XLA flag."""
    found = {name: str(card[name]) for name in PLAIN if name in card}
    gpu = [part.strip() for part in str(card.get("gpu", "")).split(",")]
    found |= dict(zip(GPU, gpu, strict=False)) if gpu != [""] else {}
    for flag in str(card.get("xla_flags", "")).split():
        name, given, value = flag.partition("=")
        found[name] = (value or "(empty)") if given else "set"
    environment = card.get("environment")
    for item in environment if isinstance(environment, list) else ():
        name, given, value = str(item).partition("=")
        if not name.startswith("--"):  # XLA flags are already included
            found[name] = value if given else "set"
    found |= _flat("config", card.get("config", {}))
    return {one_line(name): one_line(value) for name, value in found.items()}


def _flat(name: str, value: Any) -> dict[str, str]:
    if name == f"config.{FIELD}":
        return {f"config.{path}": str(inner) for path, inner in by_address(value).items()}
    if not isinstance(value, dict):
        return {name: str(value)}
    return {k: v for key in value for k, v in _flat(f"{name}.{key}", value[key]).items()}


def differing_conditions(cards: Sequence[Card]) -> dict[str, list[str]]:
    """Return each condition that differs, with its value on each card; "-" if missing.

    A published card (scripts/docs/publish_cards.py) lacks most fields of the config: those are not
    compared with it.
    """
    each = [conditions(card) for card in cards]
    names = dict.fromkeys(name for found in each for name in found)
    values = {name: [found.get(name, MISSING) for found in each] for name in names}
    few = [_is_published(card) for card in cards]
    return {
        name: row
        for name, row in values.items()
        if len({v for v, f in zip(row, few, strict=True) if v != MISSING or not f}) > 1
        or (not name.startswith("config.") and len(set(row)) > 1)
    }


def _is_published(card: Card) -> bool:
    config = card.get("config")
    return isinstance(config, dict) and any("." in name for name in config)


def differences_table(names: Sequence[str], cards: Sequence[Card]) -> str:
    """Format the conditions that differ, with a column per card."""
    found = differing_conditions(cards)
    if not found:
        return "The conditions are the same."
    rows = [("conditions that differ", *names), *((name, *row) for name, row in found.items())]
    return indented(rows, left=range(len(names) + 1))


def warnings(names: Sequence[str], cards: Sequence[Card]) -> list[str]:
    """Return a line for each condition that differs but must agree, and each card cut short.

    Missing values are ignored.
    """
    lines = []
    for name, values in differing_conditions(cards).items():
        model = name.startswith(MODEL) and name not in CHOICES
        told = [f"{v} in {n}" for n, v in zip(names, values, strict=True) if v != MISSING]
        known = {value for value in values if value != MISSING}
        if len(known) > 1 and (model or name in (*ALIKE, *ALIKE_CONFIG)):
            lines.append(f"warning: not comparable: {name} is {', '.join(told)}")
    for name, card in zip(names, cards, strict=True):
        if isinstance(stopped := card.get("cut_short"), dict):
            lines.append(f"warning: {name} was cut short by {stopped.get('by')}")
    return lines


# ----------------------------- Compares the figures of several cards, with ratios to the first card


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


# ---------- Compare cards side by side: figures with their ratio to the first card, then conditions


def compare(paths: Sequence[str]) -> None:
    """Print the comparison of cards.

    Raises:   ConfigError for fewer than two cards, or a file that is none.
    """
    if len(paths) < 2:
        fix = "use python -m jaxpar.profile A.json B.json"
        raise ConfigError("RUN_OR_TRACE", paths[0], "must be at least two cards", fix)
    print(comparison(paths, [read_card(path) for path in paths]), flush=True)


def comparison(paths: Sequence[str], cards: Sequence[dict[str, Any]]) -> str:
    """Format the cards' names, figures, warnings, and the conditions that differ."""
    names = [chr(ord("A") + n) if n < 26 else f"card{n + 1}" for n in range(len(cards))]
    titles = [f"{name}  {path}" for name, path in zip(names, paths, strict=True)]
    table, notes = training_table(names, cards)
    parts = ["\n".join(titles), table, "\n".join([*warnings(names, cards), *notes])]
    return "\n\n".join([*filter(None, parts), differences_table(names, cards)])


def read_card(path: str) -> dict[str, Any]:
    """Read a card.

    Cards of `scripts/measure/torchtitan_run.py` have fewer figures.

    Raises:   ConfigError if the file cannot be read or is not a card of --bench.
    """
    try:
        card = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise ConfigError("RUN_OR_TRACE", path, rule, "use a file written by --card") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or too deep
        rule = f"is not JSON: {error}"
        raise ConfigError("RUN_OR_TRACE", path, rule, "use a file written by --card") from error
    if not isinstance(card, dict):
        rule = f"is not a card but a JSON {type(card).__name__}"
        raise ConfigError("RUN_OR_TRACE", path, rule, "use a file written by --card")
    if not isinstance(card.get("step_seconds"), dict) and "torchtitan" not in card:
        rule = "is not a card of --bench"
        raise ConfigError("RUN_OR_TRACE", path, rule, "use a file that --bench wrote with --card")
    return card
