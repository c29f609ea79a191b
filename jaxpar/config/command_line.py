"""Read a config from the command line: a name, file or run folder, then overrides of any field.

Values are parsed here, so that a bad value is a config error like any other, and so that `None`
and the fields of an optional section can be set.
"""

import functools
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from jaxpar.config import Config, ConfigError, default_of, flag, replace, value_of
from jaxpar.config.addresses import addresses_layers, with_addressed
from jaxpar.config.code import take_code, with_code
from jaxpar.config.config_file import KNOWN, known_configs, load_config, with_arguments
from jaxpar.config.errors import joined
from jaxpar.config.explain import collected
from jaxpar.config.fields import field_types, leaf_paths, unknown_field
from jaxpar.config.listed import read_value
from jaxpar.config.model_source import ALL_FROM, ModelReader, apply_source, take_source
from jaxpar.config.resolve import fill_batch, fill_steps
from jaxpar.config.rules.numbers import numbers
from jaxpar.config.rules.paths import is_address, with_paths, with_store
from jaxpar.config.rules.type_check import check_type, wrong_sections, wrong_types
from jaxpar.config.serialize import to_json
from jaxpar.config.validate import check


@dataclass(frozen=True)
class ConfigArguments:
    """CONFIG and its overrides, `--section.field value`, as on a command line.

    A field of a command's options (`config/options.py`).
    """

    name: str
    """A config, a .py file or a run folder."""
    overrides: tuple[str, ...] = ()
    print_config: bool = False
    """Whether to print the config, and exit."""

    @classmethod
    def of(cls, argv: Sequence[str], program: str) -> "ConfigArguments":
        """Read a command line, in which CONFIG comes first.

        Raises:   ConfigError for an unknown config or field, or a value that is not of its type.
        """
        args = [arg for arg in argv if arg != PRINT_CONFIG]
        if args and args[0].partition("=")[0] == ALL_FROM:
            args = [FINETUNE, *args]
        if not args or args[0].startswith("-"):
            raise _missing_config(args, program)
        name, overrides = with_arguments(args[0], args[1:])
        made = cls(name, tuple(overrides), len(args) < len(argv))
        others, source = take_source(list(expand_set_options(made.overrides)))
        if not is_address(made.name) and not source:
            parse_overrides(made.base, others)
        return made

    @classmethod
    def without_name(cls, overrides: Sequence[str]) -> "ConfigArguments":
        """Read the overrides of a command that takes no CONFIG.

        Raises:   ConfigError for an unknown field, or a number that is not in its range.
        """
        made = cls("", tuple(overrides))
        collected((numbers,), made.asked())
        return made

    @functools.cached_property
    def base(self) -> Config:
        """The config without overrides."""
        return load_config(self.name) if self.name else Config()

    def asked(self, model_from: ModelReader | None = None) -> Config:
        """Return the config with its overrides, not yet checked.

        Args:     model_from: reads the model that `--model.from` names.
        """
        return parse_overrides(self.base, self.overrides, model_from=model_from)

    def checked(
        self,
        model_from: ModelReader | None = None,
        fill: Callable[[Config], Config] | None = None,
    ) -> Config:
        """Return the config with its overrides, checked. With --print-config: print it and exit.

        Args:     model_from: as in `asked`. fill: fills in fields from the data, before the config
                  is checked.
        Raises:   ConfigError as `validate.check`.
        """
        cfg = with_store(with_paths(self.asked(model_from)))
        cfg = fill(cfg) if fill and not wrong_types(cfg) else cfg
        check(cfg)
        self.show(cfg)
        return cfg

    def show(self, cfg: Config) -> None:
        """With --print-config: print a config and exit."""
        if self.print_config:
            print(to_json(cfg), end="", flush=True)
            sys.exit(0)


def read_config(
    argv: Sequence[str],
    model_from: ModelReader | None = None,
    fill: Callable[[Config], Config] | None = None,
) -> Config:
    """Read and check the config of a command line `CONFIG [--section.field value ...]`.

    Args:     model_from, fill: as in `ConfigArguments.checked`.
    Raises:   ConfigError for an unknown config or field, or as `validate.check`.
    """
    made = ConfigArguments.of(argv, "python -m jaxpar.train")
    return made.checked(model_from=model_from, fill=fill)


#: The config of a command line that only says what to start from.
FINETUNE = "finetune"

#: Option of all commands that take a config.
PRINT_CONFIG = "--print-config"


def as_called(text: str) -> str:
    """Replace `python -m jaxpar.NAME` in a text by the way in which the program was called.

    The command `jaxpar` (jaxpar/__main__.py) stores it in sys.argv[0], such as "jaxpar train".
    """
    called = sys.argv[0].rpartition(" ")[0]
    if called not in ("jaxpar", "python -m jaxpar"):
        return text
    return re.sub(r"python -m jaxpar\.(\w+)\b(?!\.\w)", rf"{called} \1", text)


def parse_overrides(
    cfg: Config, args: Sequence[str], *, model_from: ModelReader | None = None
) -> Config:
    """Return the config with `--section.field value` applied.

    `--code` and `--model.from` come first, wherever they stand; then addresses of layers.

    Raises:   ConfigError for an unknown field, or a value that is missing or of the wrong type.
    """
    collected((wrong_sections,), cfg)
    args, files = take_code(list(expand_set_options(args)))
    args, source = take_source(args)
    cfg = apply_source(with_code(cfg, files), source, model_from)
    given, flags, wrong = list(_pairs(args, cfg)), dict[str, Any](), list[ConfigError]()
    for path, text in given:
        if addresses_layers(cfg, path):
            cfg = with_addressed(cfg, path, functools.partial(read_value, text))
            continue
        flags.pop(path, None)  # the last value counts, at its place
        flags[path] = read_value(text, field_types()[path])
        try:
            check_type(path, flags[path])
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise joined(wrong)
    cfg = replace(cfg, **flags)
    if wrong_types(cfg):  # of a config file, which `check` reports
        return cfg
    paths = {path for path, _ in given}
    return fill_steps(fill_batch(_with_length(_with_batch(cfg, paths), paths)))


def _with_batch(cfg: Config, given: set[str]) -> Config:
    """Let the sequences of a step on a command line replace the tokens of a step in a config.

    Raises:   ConfigError if the command line has both.
    """
    sequences, tokens = "train.global_batch_size", "train.global_batch_tokens"
    if sequences not in given:
        return cfg
    if tokens in given and cfg.train.global_batch_tokens:
        rule = f"sets {sequences}, which is given as well"
        raise ConfigError(tokens, cfg.train.global_batch_tokens, rule, "use one of both")
    return replace(cfg, **{tokens: 0})


def _with_length(cfg: Config, given: set[str]) -> Config:
    """Let the length of a run on a command line replace that of a config, in steps, tokens, epochs.

    Raises:   ConfigError if the command line has several that are not 0.
    """
    steps, tokens, epochs = "train.num_steps", "train.num_tokens", "train.num_epochs"
    here = [p for p in (epochs, tokens, steps) if p in given and value_of(cfg, p)]
    if len(here) > 1:
        rule = f"sets {here[1]}, which is given as well"
        raise ConfigError(here[0], value_of(cfg, here[0]), rule, "use one of both")
    others = {tokens: 0, epochs: 0.0}
    return replace(cfg, **{p: none for p, none in others.items() if here and p not in here})


def _pairs(args: Sequence[str], cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for each `--section.field text`, with "=" or a space."""
    rest, before = iter(args), ("", "")
    for arg in rest:
        name, given, text = arg.removeprefix("--").partition("=")
        path = name.replace("-", "_")
        if not arg.startswith("--"):
            raise _no_option(arg, path, text, before)
        if not given:
            text = next(rest, "--")
        missing = not given and text.startswith("--")
        if path not in field_types() and not addresses_layers(cfg, path):
            if f"--{name}" in _NOT_OPTIONS and _is_config(text):
                rule = f"is CONFIG, the first argument, and no value of --{name}"
                raise ConfigError("command line", text, rule, f"use {text} in place of CONFIG")
            value = "" if missing else text
            shown = flag if missing else functools.partial(flag, value=value)
            in_model = path.startswith("model.")
            raise unknown_field(path, value, shown if in_model else flag, cfg)
        if missing and path not in field_types():
            raise ConfigError(path, "", "needs a value", f"use {flag(path)} VALUE")
        if missing:
            leaf = next(leaf for leaf in leaf_paths() if leaf.startswith(path))
            raise ConfigError(path, "", "needs a value", f"use {flag(leaf, default_of(leaf))}")
        before = path, text
        yield path, text


def _missing_config(args: Sequence[str], program: str) -> ConfigError:
    """Return the error for a command line that does not begin with CONFIG."""
    rule = f"is missing before {args[0]}" if args else "is missing"
    meant = next((arg for arg in args if _is_config(arg)), "")
    if meant:
        others = [shlex.quote(arg) for arg in args if arg not in (meant, *_NOT_OPTIONS)]
        return ConfigError("CONFIG", "", rule, f"use {' '.join([program, meant, *others])}")
    return ConfigError("CONFIG", "", rule, f"{KNOWN}, as in: {program} quickstart")


#: Options of other programs whose value is a config or a run here.
_NOT_OPTIONS = ("--config", "--resume", "--resume-from", "--model", "--run", "-c")


def _is_config(arg: str) -> bool:
    """Return whether an argument names a config or a run, and so could be CONFIG."""
    return arg in known_configs().split(", ") or (Path(arg) / "config.json").is_file()


def _no_option(arg: str, path: str, text: str, before: tuple[str, str]) -> ConfigError:
    """Return the error for an argument without dashes, perhaps in the style of another program.

    Args:     before: the path and the text of the option before it.
    """
    rule, path = "is not --section.field value", path.lstrip("+-")
    if path in field_types() and text:
        return ConfigError("command line", arg, rule, f"use {flag(path, text)}")
    if text:
        return unknown_field(path, text, lambda known: flag(known, text))
    if get_origin(field_types().get(before[0])) is tuple:
        rule, fix = "is no option", f"use {flag(before[0], f'{before[1]},{arg}')}"
        return ConfigError("command line", arg, rule, fix)
    return ConfigError("command line", arg, rule, "see --help")


def expand_set_options(args: Sequence[str]) -> Iterator[str]:
    """Rewrite `--set section.field=text ...` as one `--section.field=text` each.

    Raises:   ConfigError for anything else after --set, or for nothing.
    """
    setting = False
    for arg, following in itertools.zip_longest(args, args[1:], fillvalue="--"):
        if arg.startswith("--set="):
            raise _no_setting(arg.removeprefix("--"))
        if not arg.startswith("--"):
            if setting and "=" not in arg:
                raise _no_setting(arg)
            yield f"--{arg}" if setting else arg
            continue
        setting = arg == "--set"
        if setting and following.startswith("--"):
            raise _no_setting("")
        if not setting:
            yield arg


def _no_setting(text: str) -> ConfigError:
    return ConfigError("--set", text, "is not SECTION.FIELD=VALUE", "use --set train.num-steps=100")


def require_unicode(argv: Sequence[str]) -> None:
    """Raises:   ConfigError for an argument with bytes that the locale's encoding does not have."""
    for arg in argv:
        try:
            arg.encode("utf-8")
        except UnicodeEncodeError as error:
            encoding = sys.getfilesystemencoding()
            rule = f"has a byte that is not {encoding}, character {error.start + 1}"
            fix = "use UTF-8 text" + ("" if encoding == "utf-8" else ", and set PYTHONUTF8=1")
            raise ConfigError("command line", arg, rule, fix) from None
