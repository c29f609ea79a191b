"""The generated pages of the documentation: `jaxpar --help configuration`, and `combinations`.

The site has both. Their tables are made of the dataclasses of `config/schema/`, `features/` and
`components/`, and of `incompatible.py`; `configuration.md` beside this file is the text around the
table of fields.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpar import config
from jaxpar.components.component import Component, FeedForward, Mixer
from jaxpar.components.model import Layer, Norm, in_words
from jaxpar.config import fields
from jaxpar.config.incompatible import TABLE
from jaxpar.config.layers import OURS
from jaxpar.config.listed import form, has_fields, item_of, written

#: The text of the page of fields, and where its tables go.
TEXT, MARK = Path(__file__).with_name("configuration.md"), "<!-- every field -->\n"

#: The values of an optional section.
OPTIONAL = "`None`, a section"

#: The names of fields with components of these classes.
NAMES = {Mixer: "mixer", FeedForward: "feed_forward"}


def values_text(default: Any, hint: Any) -> str:
    """Describe a field's default, as on the command line, and what else it may be.

    The type of a number, a boolean or a text is that of the default.
    """
    if default is dataclasses.MISSING:
        return ", ".join(_others(hint)) or hint.__name__
    if isinstance(default, tuple) and default and isinstance(default[0], Layer):
        return f"`{in_words(default)}`"
    shown = f"{type(default).__name__}()" if isinstance(default, Component) else written(default)
    others = [text for text in _others(hint) if shown not in (text, f"{text}()")]
    others = [text for text in others if text != "None" or isinstance(default, Component)]
    return ", ".join([f"`{shown}`" if shown != "" else "(empty)", *others])


def _others(hint: Any) -> list[str]:
    """Return the choices of a field, or the types of one that may be None."""
    hint = getattr(hint, "__value__", hint)
    if typing.get_origin(hint) is tuple:
        item = item_of(hint)
        return [] if item is None else [f"`{form(item)},…`"]
    if typing.get_origin(hint) is typing.Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        named = lambda part: "None" if part is types.NoneType else part.__name__  # noqa: E731
        return [text for part in typing.get_args(hint) for text in _others(part) or [named(part)]]
    return []


def section_table(name: str, cls: Any) -> list[str]:
    """Return the lines of a section's table; nested sections follow with longer paths."""
    lines = []
    for field, hint in fields.hints_in(cls).items():
        path, inner = f"{name}.{field}", fields.section_of(hint)
        always = inner is Norm
        values = "a section" if always else OPTIONAL
        if fields.is_required(path):
            values = f"{hint.__name__}, required"
        elif not inner:
            values = values_text(fields.default_of(path), hint)
        meaning = inspect.getdoc(inner) if always else fields.meanings(cls)[field]
        lines.append(_row(f"`{path}`", values, meaning or ""))
        if has_fields(item := item_of(hint)):
            lines += item_rows(path, item)
        if inner is not None:
            lines += section_table(path, inner)
    return lines


def item_rows(path: str, item: Any) -> list[str]:
    """Return the lines of the fields of a list's items."""
    hints, rows = typing.get_type_hints(item), list[str]()
    for field in dataclasses.fields(item):
        values = values_text(field.default, hints[field.name])
        meaning = fields.meanings_of(item)[field.name]
        rows.append(_row(f"`{path}[].{field.name}`", values, meaning))
    return rows


def _row(*cells: str) -> str:
    return "|" + "|".join(text.replace("|", r"\|") for text in cells) + "|"


def component_table(name: str, cls: Any) -> list[str]:
    """Return the lines of the fields that a component's class declares itself."""
    hints, own = typing.get_type_hints(cls), inspect.get_annotations(cls)
    return [
        _row(
            f"`{name}{field.name}`",
            values_text(field.default, hints[field.name]),
            fields.meanings(cls).get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
        if field.name in own
    ]


def components() -> Iterator[tuple[str, Any]]:
    """Yield each class of components, and those of its fields, after the name of their fields."""
    yield "", Layer
    seen: set[Any] = set()
    for cls in OURS.values():
        if role := _role(cls):
            yield f"{role}.", cls
            yield from _parts("", cls, seen)


def _role(cls: Any) -> str:
    return next((role for base, role in NAMES.items() if issubclass(cls, base)), "")


def _parts(name: str, cls: Any, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    for field, hint in typing.get_type_hints(cls).items():
        hint = getattr(hint, "__value__", hint)
        for part in typing.get_args(hint) or (hint,):
            if dataclasses.is_dataclass(part) and part not in seen and not _role(part):
                seen.add(part)
                yield f"{name}{field}.", part
                yield from _parts(f"{name}{field}.", part, seen)


def table() -> str:
    """Return the tables of all sections, and of components after the model, as Markdown."""
    parts = []
    for name, hint in typing.get_type_hints(config.Config).items():
        cls = fields.section_of(hint)
        rows = section_table(name, cls)
        if cls is not hint:
            rows.insert(
                0,
                _row(f"`{name}`", OPTIONAL, fields.meanings(config.Config).get(name, "None: off.")),
            )
        parts.append(_part(f"### {name}", cls, rows))
        if name == "model":
            for at, part in components():
                parts.append(_part(f"#### {part.__name__}", part, component_table(at, part)))
    return "\n".join(parts)


def _part(title: str, cls: Any, rows: list[str]) -> str:
    head = ["", "|field|default, others|meaning|", "|---|---|---|"] if rows else []
    said = (inspect.getdoc(cls) or "").replace("\n", " ")
    return "\n".join([title, "", said, *head, *rows]) + "\n"


HEAD = """# What combines with what

Settings and parts of models can be combined, except these pairs, each refused with its reason and a
fix. Other rules are of one field: sizes that a mesh must divide, and options that need another one.

|setting|is not supported with|
|---|---|
"""


def configuration() -> str:
    """Return the page of fields."""
    return TEXT.read_text("utf-8").replace(MARK, table())


def combinations() -> str:
    """Return the page of what is refused: a row a setting, with all that it excludes, by reason."""
    rows: dict[str, dict[str, list[str]]] = {}
    for one, other, why in TABLE:
        rows.setdefault(other.label, {}).setdefault(why, []).append(one.label)
    cells = {
        label: "; ".join(f"{', '.join(excluded)}: {why}" for why, excluded in reasons.items())
        for label, reasons in rows.items()
    }
    return HEAD + "".join(f"|{label}|{cell}|\n" for label, cell in cells.items())


#: The generated pages by name, as the others of docs/.
PAGES = {"combinations": combinations, "configuration": configuration}
