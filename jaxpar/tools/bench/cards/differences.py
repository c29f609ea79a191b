"""Finds the conditions that differ between cards: GPU, versions, flags, commit, config."""

from collections.abc import Sequence
from typing import Any

from jaxpar.runtime.tables import indented

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
#: Fields of the model that only select an implementation.
CHOICES = (
    "config.model.attention_backend",
    "config.model.attention_deterministic",
    "config.model.recurrent_backend",
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


def table(names: Sequence[str], cards: Sequence[Card]) -> str:
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
        model = name.startswith("config.model.") and name not in CHOICES
        told = [f"{v} in {n}" for n, v in zip(names, values, strict=True) if v != MISSING]
        known = {value for value in values if value != MISSING}
        if len(known) > 1 and (model or name in (*ALIKE, *ALIKE_CONFIG)):
            lines.append(f"warning: not comparable: {name} is {', '.join(told)}")
    for name, card in zip(names, cards, strict=True):
        if isinstance(stopped := card.get("cut_short"), dict):
            lines.append(f"warning: {name} was cut short by {stopped.get('by')}")
    return lines
