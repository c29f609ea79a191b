"""`--help` of all commands: their options, and of a config an overview, a section, or all."""

import dataclasses
import difflib
import functools
import shutil
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from jaxpar.components.model import Layer
from jaxpar.config import Config, ConfigError, default_of, flag, value_of
from jaxpar.config.command_line import as_called
from jaxpar.config.config_file import (
    arguments_of,
    default_in_words,
    known_configs,
    load_config,
    type_of,
)
from jaxpar.config.fields import (
    LENGTH,
    field_types,
    is_required,
    leaf_paths,
    meanings,
    meanings_of,
    section_of,
)
from jaxpar.config.layers import FIELD, all_paths, type_at
from jaxpar.config.listed import form, has_fields, item_of, members, plain, written
from jaxpar.config.option_fields import Declared, Forms, config_field, declared, only_fields
from jaxpar.config.rules.paths import is_address
from jaxpar.config.values import Value

#: The topic that shows every field.
ALL = "all"

#: Sections of the config, in order.
SECTIONS = tuple(field.name for field in dataclasses.fields(Config))

#: Maximum columns of a help text, even in a wider terminal.
MAX_WIDTH = 100

#: The fields that plain `--help` shows: those that a user's first run changes.
COMMON_FIELDS = """run.dir run.cpu_devices train.num_steps train.global_batch_size data.path
data.seq_len model.num_layers model.d_model parallel.auto parallel.data parallel.tensor
parallel.pipeline parallel.num_microbatches parallel.remat optimizer.learning_rate
checkpoint.every""".split()

#: Description of CONFIG.
ABOUT_CONFIG = """\
CONFIG is one of
  {known}
a .py file with a get_config(), or a run folder, to resume the run with its latest config."""

#: Options of all commands that take a config.
OPTIONS = """\
options of the config:
  --SECTION.FIELD VALUE           set a field
  --set SECTION.FIELD=VALUE ...   set several fields
  --from NAME, --model.from NAME  start from a published model, or take its shape only
  --help SECTION, --help all      show the fields of one section, or all {count}
  --code FILE                     import the classes of a run's own losses, probes and callbacks
  --print-config                  print the config as JSON, and exit"""


def asks_help(args: Sequence[str]) -> bool:
    """Return whether a command line contains --help."""
    return "--help" in args or "-h" in args


def topic_of(args: Sequence[str]) -> str:
    """Return the topic after --help: a section, `ALL`, or "" for the overview.

    Raises:   ConfigError for any other topic.
    """
    at = next(i for i, arg in enumerate(args) if arg in ("--help", "-h"))
    topic = "".join(args[at + 1 : at + 2])
    if not topic or topic.startswith("-"):
        return ""
    if topic not in (*SECTIONS, ALL):
        near = difflib.get_close_matches(topic, SECTIONS, n=1)
        known = near or [f"one of {', '.join(SECTIONS)}, {ALL}"]
        fix = f"use --help {known[0]}" if near else f"use {known[0]}"
        raise ConfigError("--help", topic, "is not a section of the config", fix)
    return topic


def print_help(
    program: str, doc: str | None, form: type | None, forms: Forms, words: Sequence[str]
) -> None:
    """Print the help of a command, or of one topic of its config.

    Args:     program: as it was called. doc: the text above the options. form: the options. None:
              list the subcommands. forms: all of the command. words: the command line, whose first
              word may be the config whose values are shown.
    """
    print("\n\n".join(filter(None, _parts(program, doc, form, forms, words))))


def _parts(
    program: str, doc: str | None, form: type | None, forms: Forms, words: Sequence[str]
) -> Iterator[str]:
    named = forms if isinstance(forms, Mapping) else {}
    others = {n: (other.__doc__ or "").partition("\n\n")[0] for n, other in named.items() if n}
    text = as_called(doc or "").strip()
    if form is None:
        yield f"usage: {program} COMMAND [options]"
        yield text
        yield _listed("commands", others.items())
        yield f"{program} COMMAND --help shows the options of a command."
        return
    config = config_field(form)
    topic = topic_of(words) if config else ""
    name = words[0] if words and not words[0].startswith("-") else ""
    cfg = load_config(name) if config and name and not is_address(name) else Config()
    if topic:
        for section in SECTIONS if topic == ALL else (topic,):
            title = f"{section}: {' '.join(meaning_of_section(section).split())}"
            of_section = (p for p in field_types() if f"{p}.".startswith(f"{section}."))
            paths = (LENGTH if path == FIELD else path for path in of_section)
            yield _listed(title, _rows(cfg, paths))
            if section == "model":
                yield from _of_layers(cfg)
        return
    arguments = [one for one in declared(form) if one.argument]
    only = only_fields(form)
    named_config = config and not only
    usage = ["usage:", program, *["CONFIG"] * bool(named_config)]
    usage += [*(one.argument for one in arguments), "[options]"]
    yield " ".join([*usage, *["[--section.field VALUE ...]"] * bool(config)])
    yield text
    if named_config:
        known = textwrap.fill(f"{known_configs()},", 98, subsequent_indent="  ")
        yield ABOUT_CONFIG.format(known=known)
    yield _listed(f"arguments of {name}", _of_config(name) if named_config else ())
    yield _listed("arguments", ((one.argument, one.meaning) for one in arguments))
    options = [(_written(one), _meaning(one)) for one in declared(form) if not one.argument]
    yield _listed("options", options)
    if form is named.get(""):
        yield _listed("instead", ((f"{name} ...", meaning) for name, meaning in others.items()))
    if only:
        below = tuple(f"{one}." for one in only)
        paths = (path for path in leaf_paths() if f"{path}.".startswith(below))
        yield _listed("fields of the config", _rows(cfg, paths))
    elif config:
        leaves = sum(section_of(hint) is None for hint in field_types().values())
        yield OPTIONS.format(count=leaves)
        sections = ((name, meaning_of_section(name)) for name in SECTIONS)
        yield _listed("sections of the config", sections, 14)
        yield _listed("fields that are often set", _rows(cfg, COMMON_FIELDS, items=False))


def _listed(title: str, rows: Iterable[tuple[str, str]], column: int = 30) -> str:
    """Return a title with rows of a name and its meaning below; empty without rows."""
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    lines = []
    for name, meaning in rows:
        beside = f"  {name:<{column - 4}}  "
        if len(beside) > column:
            lines.append(f"  {name}")
            beside = " " * column
        text = as_called(" ".join(meaning.split()))
        below = " " * column
        lines.append(textwrap.fill(text, width, initial_indent=beside, subsequent_indent=below))
    return "\n".join([textwrap.fill(f"{title}:", width), *map(str.rstrip, lines)]) if lines else ""


def _of_config(name: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a config's get_config(), with their meanings and defaults."""
    for parameter in arguments_of(name).values():
        meaning = " ".join(getattr(parameter.annotation, "__metadata__", ()))
        option = parameter.name.replace("_", "-")
        kind = getattr(type_of(parameter), "__name__", "value")
        default = default_in_words(parameter)
        yield f"--{option} {kind.upper()}", f"{meaning} (default: {default})".strip()


def _written(one: Declared) -> str:
    """Return an option as it is written: "-n, --num-processes N"."""
    short = f"{one.written.short}, " * bool(one.written.short)
    if one.hint is bool:
        return f"--[no-]{one.name[2:]}" if one.default is True else one.name
    several = " [...]" * one.takes_several
    return f"{short}{one.name} {one.value_name()}{several}"


def _meaning(one: Declared) -> str:
    """Return the meaning of an option, with its default."""
    if one.hint is bool:
        return f"{one.meaning} (default: on)" if one.default is True else one.meaning
    if one.required or one.default in (None, "", ()):
        return one.meaning
    default = " ".join(map(repr, one.default)) if one.takes_several else one.default
    return f"{one.meaning} (default: {default})"


def meaning_of_section(name: str) -> str:
    """Return the docstring of a section."""
    return section_of(field_types()[name]).__doc__ or ""


def _rows(cfg: Config, paths: Iterable[str], *, items: bool = True) -> Iterator[tuple[str, str]]:
    """Yield fields of a config as on a command line, with docstrings and values.

    Args:     items: also the fields of the items of lists.
    """
    for path in paths:
        if path == LENGTH:
            text = "Number of layers."
            yield f"{flag(path)} INT", f"{text} (default: {cfg.model.num_layers})"
            continue
        if section_of(field_types()[path]) is field_types()[path]:  # whose fields follow
            continue
        section, _, name = path.rpartition(".")
        section_class: Any = type(default_of(section)) if section else Config
        text = meanings(section_class).get(name, "None: off.")
        if section_of(field_types()[path]) is None:
            text = f"{text} ({_value(cfg, path)})"
        yield f"{flag(path)} {_metavar(field_types()[path])}", text
        if (item := item_of(field_types()[path])) is None or not items:
            continue
        if names := _names(item):
            yield "  NAME", f"One of {', '.join(names)}."
        if has_fields(item):
            for name, of_field in meanings_of(item).items():
                yield f"  {name.upper()}", of_field


def _of_layers(cfg: Config) -> Iterator[str]:
    """Yield the fields of the model's layers, by their addresses."""
    layers = cfg.model.layers
    for layer in dict.fromkeys(layers):
        rows = []
        for path in all_paths((layer,)):
            *parents, name = path.split(".")[2:]
            value = functools.reduce(getattr, parents, layer)
            default = written(getattr(value, name)) or "empty"
            text = f"{meanings_of(type(value)).get(name, '')} (default: {default})".strip()
            hint = type_at(layers, path)
            metavar = _metavar(hint)
            metavar = "(in Python)" if metavar == "None" else metavar
            rows.append((f"{flag(path)} {metavar}", text))
        number = sum(one == layer for one in layers)
        yield _listed(f"{layer.name}: {number} of {len(layers)} layers", rows)


def _value(cfg: Config, path: str) -> str:
    """Return a field's value, or its default in an optional section that is None."""
    is_off = value_of(cfg, path.rpartition(".")[0]) is None
    if is_off and is_required(path):
        return "required"
    value = default_of(path) if is_off else value_of(cfg, path)
    return f"default: {'none' if value == () else written(value) or 'empty'}"


def _names(item: Any) -> list[str]:
    """Return the names of which a list consists; none for another list."""
    return [one for one in members(item) if isinstance(one, str)]


def _metavar(hint: Any) -> str:
    """Return a field's type: INT, INT|None, {scan,unroll}; None for an optional section."""
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    if (item := item_of(hint)) is not None:
        choices = [one for one in members(hint) if isinstance(one, str)]
        return "|".join([*choices, "NAME,..." if _names(item) else f"{form(item)},..."])
    options = [plain(one) for one in typing.get_args(hint)] or [hint]
    if typing.get_origin(options[0]) is typing.Literal:
        return _metavar(options[0])
    if section_of(hint) is not None:
        return "None"
    if Value in options or Layer in options:
        return "(in Python)"
    return "|".join("None" if one is NoneType else one.__name__.upper() for one in options)
