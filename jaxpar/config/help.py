"""`--help` of programs that take a config: an overview, one section, or every field."""

import argparse
import dataclasses
import difflib
import functools
import shutil
import textwrap
import typing
from collections.abc import Sequence
from types import NoneType
from typing import Any

from jaxpar.config import Config, ConfigError, default_of, flag, value_of
from jaxpar.config.fields import field_types, meanings, section_of

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

#: Options that all of these programs have.
OPTIONS = """\
--SECTION.FIELD VALUE           set a field
--set SECTION.FIELD=VALUE ...   set several fields
--model.from NAME               take the model's shape from a published config.json
--help SECTION                  show the fields of one section
--help all                      show all {count} fields"""


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


def print_help(cfg: Config, prog: str, description: str, topic: str = "", more: str = "") -> None:
    """Print the usage of a program that takes a config, or fields of the config.

    Args:     cfg: the config whose values are shown. prog: "" for no usage line. topic: as returned
              by `topic_of`. more: lines about other options.
    """
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--section.field VALUE ...]" if prog else argparse.SUPPRESS,
        description=None if topic else description,
        add_help=False,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, width=width, max_help_position=36
        ),
    )
    if topic:
        for section in SECTIONS if topic == ALL else (topic,):
            group = parser.add_argument_group(section, meaning_of_section(section))
            _add(group, cfg, [path for path in field_types() if _lies_in(path, section)])
    else:
        leaves = sum(section_of(hint) is None for hint in field_types().values())
        options = "\n".join([OPTIONS.format(count=leaves), *more.splitlines()])
        parser.add_argument_group("options", options)
        parser.add_argument_group("sections of the config", _list_of_sections(width - 2))
        _add(parser.add_argument_group("fields that are often set"), cfg, COMMON_FIELDS)
    print(parser.format_help(), end="")


def meaning_of_section(name: str) -> str:
    """Return the docstring of a section."""
    return typing.get_type_hints(Config)[name].__doc__ or ""


def _list_of_sections(width: int) -> str:
    lines = [f"{name:<12}{meaning_of_section(name)}" for name in SECTIONS]
    return "\n".join(textwrap.fill(line, width, subsequent_indent=" " * 12) for line in lines)


def _lies_in(path: str, section: str) -> bool:
    return path.startswith(section + ".")


def _add(group: Any, cfg: Config, paths: Sequence[str]) -> None:
    """Add fields to a group of options, with their docstrings and their values in a config."""
    for path in paths:
        section, _, name = path.rpartition(".")
        section_class: Any = type(default_of(section))
        text = meanings(section_class)[name]
        if section_of(field_types()[path]) is None:
            value = str(_value(cfg, path)) or "empty"
            text = f"{text} (default: {value})"
        group.add_argument(
            flag(path), metavar=_metavar(field_types()[path]), help=text.replace("%", "%%")
        )


def _value(cfg: Config, path: str) -> Any:
    """Return a field's value, or its default in an optional section that is None."""
    section = path.rpartition(".")[0]
    return default_of(path) if value_of(cfg, section) is None else value_of(cfg, path)


def _metavar(hint: Any) -> str:
    """Return a field's type: INT, INT|None, {scan,unroll}; None for an optional section."""
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    if section_of(hint) is not None:
        return "None"
    options = typing.get_args(hint) or (hint,)
    return "|".join("None" if one is NoneType else one.__name__.upper() for one in options)
