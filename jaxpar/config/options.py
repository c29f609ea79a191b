"""Read a command line as a dataclass: the options of every command, declared once.

A field of the dataclass is an option, read by its type and explained by its docstring:

    @dataclass(frozen=True, kw_only=True)
    class SampleOptions:
        run: Annotated[str, Argument("RUN")]
        '''Run folder.'''
        max_tokens: Annotated[int, Range(1, 1 << 20, 200)] = 200
        '''Most tokens of a text.'''

reads `RUN --max-tokens 100`. A tuple takes several values, and a bool none: `--save`, `--no-save`.
The field of type `ConfigArguments` is CONFIG with all its `--section.field VALUE`. A command has
one such dataclass, or several by name: `{"prepare": ..., "inspect": ...}` are subcommands, and
`{"": ..., "--chat": ...}` uses.
"""

import dataclasses
import difflib
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.config.command_line import (
    ConfigArguments,
    as_called,
    expand_set_options,
    require_unicode,
)
from jaxpar.config.config_file import arguments_of
from jaxpar.config.errors import ConfigError
from jaxpar.config.fields import flag, leaf_paths
from jaxpar.config.help import asks_help, print_help
from jaxpar.config.listed import members, read_value
from jaxpar.config.option_fields import (
    OR_ADDRESS,
    PATHS,
    TO_ADDRESS,
    Argument,
    Declared,
    Forms,
    OnlyFields,
    Step,
    Written,
    config_field,
    declared,
    only_fields,
    value_in,
)
from jaxpar.config.rules.limits import Range
from jaxpar.config.rules.paths import is_address, normalized, refuse_address
from jaxpar.config.rules.type_check import describe, fits

__all__ = [
    "OR_ADDRESS",
    "TO_ADDRESS",
    "Argument",
    "Forms",
    "OnlyFields",
    "Range",
    "Step",
    "Written",
    "check_ranges",
    "read_options",
]


def read_options(forms: Forms, argv: Sequence[str], program: str, doc: str | None) -> Any:
    """Read a command line as an instance of a dataclass. `--help` prints the help and exits.

    Args:     program: as it is called, such as "python -m jaxpar.sample". doc: for --help.
    Raises:   ConfigError for an option that is unknown, missing, not of its type or not in its
              `Range`; for an unknown config, or a field of it.
    """
    require_unicode(argv)
    program = as_called(program)
    name, form, words = _chosen(forms, argv, program)
    asked = program + f" {name}" * bool(name)
    if form is None or asks_help(words):
        print_help(asked, doc if form is None or not name else form.__doc__, form, forms, words)
        raise SystemExit(0)
    return _read(form, words, asked)


def _chosen(
    forms: Forms, argv: Sequence[str], program: str
) -> tuple[str, type | None, Sequence[str]]:
    """Return the name of the form that a command line has, the form, and the words without it.

    No form: the command line asks for help on all of them.
    """
    if not isinstance(forms, Mapping):
        return "", forms, argv
    if "" in forms:
        words = [part for word in argv for part in _without_equals(word, forms)]
        given = [name for name in forms if name and name in words]
        if len(given) > 1:
            rule = f"cannot be combined with {given[0]}"
            raise ConfigError("command line", given[1], rule, "use one of both")
        name = given[0] if given else ""
        _check_uses(forms, name, words)
        return name, forms[name], [word for word in words if not name or word != name]
    name, *rest = argv or ["--help"]
    if asks_help([name]):
        return "", None, argv
    if name not in forms:
        near = difflib.get_close_matches(name, forms, n=1)
        fix = f"use {program} {near[0]}" if near else f"use one of {', '.join(forms)}"
        raise ConfigError("command line", name, f"is not a command of {program}", fix)
    return name, forms[name], rest


def _without_equals(word: str, forms: Mapping[str, type]) -> list[str]:
    """Return the name of a use and its value, for "--use=value"; a list of the word for others."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name in forms else [word]


def _check_uses(forms: Mapping[str, type], name: str, argv: Sequence[str]) -> None:
    """Raises:   ConfigError for an option of another use of the command."""
    others = {option: use for use in forms if use != name for option in _options(forms[use])}
    for word in argv:
        option = word.partition("=")[0].replace("_", "-")
        if option in others and option not in _options(forms[name]):
            rule = f"cannot be combined with {name}" if name else f"is only for {others[option]}"
            raise ConfigError("command line", option, rule, "remove it")


def _read(form: type, argv: Sequence[str], program: str) -> Any:
    """Read a command line as one form."""
    arguments, texts, overrides = _sorted(form, argv, program)
    values: dict[str, Any] = {}
    if (config := config_field(form)) is not None:
        if only := only_fields(form):
            _check_fields(overrides, only, program)
            values[config.name] = ConfigArguments.without_name(overrides)
        else:
            both = arguments_of(arguments[0]) if arguments else {}
            for one in declared(form):  # an option may also be an argument of the config
                if one.field in both and one.field in texts:
                    overrides.append(f"{one.name}={texts[one.field][-1]}")
            values[config.name] = ConfigArguments.of(arguments + overrides, program)
            arguments = []
    for one in declared(form):
        if one.argument:
            taken = arguments if one.takes_several else arguments[:1]
            texts[one.field], arguments = [*taken], arguments[len(taken) :]
        if texts.get(one.field):
            place = values.setdefault(one.group, {}) if one.group else values
            place[one.field] = _value(one, texts[one.field])
        elif one.required:
            names = (x.argument for x in declared(form) if x.argument)
            more = [*names] if one.argument else [*map(shlex.quote, argv), one.example()]
            raise ConfigError(one.name, "", "is missing", f"use {' '.join([program, *more])}")
    if arguments:
        rule = "is one argument too many"
        raise ConfigError("command line", arguments[0], rule, f"see {program} --help")
    hints = typing.get_type_hints(form)
    groups = dict.fromkeys(one.group for one in declared(form) if one.group in values)
    return with_paths(form(**values | {name: hints[name](**values[name]) for name in groups}))


def _check_fields(overrides: Sequence[str], only: Sequence[str], program: str) -> None:
    """Raises:   ConfigError for a field that is not one of the command's."""
    below = tuple(f"{one}." for one in only)
    fields = {p.rpartition(".")[2]: flag(p) for p in leaf_paths() if f"{p}.".startswith(below)}
    for word in expand_set_options(overrides):
        path = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and not f"{path}.".startswith(below):
            near = difflib.get_close_matches(path.rpartition(".")[2], fields, n=1)
            fix = f"use {fields[near[0]]}" if near else f"see {program} --help"
            raise ConfigError("command line", word, f"is not an option of {program}", fix)


def _sorted(
    form: type, argv: Sequence[str], program: str
) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Return the positional arguments, the texts of each option by field, and the overrides.

    Raises:   ConfigError for an option that is unknown or has no value.
    """
    options = _options(form)
    arguments, texts, overrides = list[str](), dict[str, list[str]](), list[str]()
    words = list(argv)
    takes_one = config_field(form) is not None and not only_fields(form)
    while words:
        word = words.pop(0)
        name, given, text = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        one = options.get(name)
        if word == "--":
            arguments += [] if config_field(form) else words
            words = words if config_field(form) else []
        elif one is not None and one.hint is bool:
            texts[one.field] = [text if given else str(not name.startswith("--no-"))]
        elif one is not None:
            found = [text] if given else list(_values(one, words))
            if not found:
                raise ConfigError(one.name, "", "needs a value", f"use {one.example()}")
            texts[one.field] = [*texts.get(one.field, []), *found] if one.takes_several else found
        elif not word.startswith("-") or _is_number(word):
            # After CONFIG there is none: the error names the option that it follows.
            (overrides if takes_one and arguments else arguments).append(word)
        elif config_field(form) is None or _is_misspelled(name, options):
            raise _unknown(word, name, options, program)
        else:
            overrides.append(word)
            several, one_more = name == "--set", not given
            while one_more and words and not words[0].startswith("--"):
                overrides.append(words.pop(0))
                one_more = several
    return arguments, texts, overrides


def _options(form: type) -> dict[str, Declared]:
    """Return the options of a form by their names."""
    return {name: one for one in declared(form) if not one.argument for name in _names(one)}


def _names(one: Declared) -> Iterator[str]:
    """Yield the names of an option."""
    yield one.name
    if one.written.short:
        yield one.written.short
    if one.hint is bool:
        yield f"--no-{one.name[2:]}"


def _values(one: Declared, words: list[str]) -> Iterator[str]:
    """Take the values of an option from the words after it."""
    while words and not words[0].startswith("--"):
        yield words.pop(0)
        if not one.takes_several:
            return


def _is_number(word: str) -> bool:
    """Return whether a word that begins with a dash is a number below 0."""
    return word[1:2].isdigit()


def _is_misspelled(name: str, options: Mapping[str, Declared]) -> bool:
    """Return whether a name is almost that of an option, and not a field of a config."""
    return "." not in name and bool(difflib.get_close_matches(name, options, n=1, cutoff=0.8))


def _unknown(word: str, name: str, options: Mapping[str, Declared], program: str) -> ConfigError:
    known = {option.lstrip("-"): option for option in options}
    near = difflib.get_close_matches(name.lstrip("-"), known, n=1)
    fix = f"use {known[near[0]]}" if near else f"see {program} --help"
    return ConfigError("command line", word, f"is not an option of {program}", fix)


def _value(one: Declared, texts: Sequence[str]) -> Any:
    """Read the texts of an option as its type.

    Raises:   ConfigError for one that is not of the type, or not in the range.
    """
    found = [_item(one, text) for text in texts]
    return tuple(found) if one.takes_several else found[-1]


def _item(one: Declared, text: str) -> Any:
    value = read_value(text, one.item)
    if not fits(value, one.item):
        choices = [str(choice) for choice in members(one.item) if not isinstance(choice, type)]
        near = difflib.get_close_matches(text, choices, n=1)
        fix = f"{one.name} {near[0]}" if near else one.example()
        raise ConfigError(one.name, text, f"must be {describe(one.item)}", f"use {fix}")
    _check_range(one, value)
    return value


def _check_range(one: Declared, value: Any) -> None:
    for limits in one.marks:
        if isinstance(limits, Range) and isinstance(value, int) and value not in limits:
            rule = limits.rule(value)
            raise ConfigError(one.name, value, rule, f"use {one.name} {limits.good}")


def check_ranges(options: Any) -> None:
    """Check the whole numbers of a dataclass of options that Python made.

    Raises:   ConfigError that names the option.
    """
    form: type = type(options)
    for one in declared(form):
        _check_range(one, value_in(options, one))


def with_paths[T](options: T) -> T:
    """Return a dataclass of options with `normalized` paths.

    Raises:   ConfigError that names an argument or option that must be a path, and is an address,
              such as s3://bucket/run.
    """
    asked: Any = options
    changed: dict[str, Any] = {}
    form: type = type(asked)
    for one in declared(form):
        if one.group or (not one.argument and one.field not in PATHS):
            continue
        value = getattr(asked, one.field)
        texts = value if isinstance(value, tuple) else (value,)
        for text in texts:
            may_be = OR_ADDRESS in one.marks or TO_ADDRESS in one.marks
            if isinstance(text, str) and not (may_be and is_address(text)):
                refuse_address(one.name, text, "use a path on this host")
        made = tuple(normalized(text) if isinstance(text, str) else text for text in texts)
        if made != texts:
            changed[one.field] = made if isinstance(value, tuple) else made[0]
    return dataclasses.replace(asked, **changed) if changed else options
