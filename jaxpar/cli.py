"""The command line shared by the programs: a config file, then typed overrides of any field.

Values are read here, so that whatever is wrong with one is said like any other config error, and
`None` and the fields of an optional section can be given; tyro writes the help.
"""

import contextlib
import errno
import importlib.util
import io
import itertools
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from jaxpar import guard
from jaxpar.config import (
    Config,
    ConfigError,
    RopeScaling,
    default_of,
    field_types,
    flag,
    leaf_paths,
    replace,
    unknown_field,
)
from jaxpar.config_json import to_json
from jaxpar.config_types import check_types
from jaxpar.validation import check

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def read_config(argv: Sequence[str], prog: str, doc: str | None) -> Config:
    """The config that a command line `CONFIG [--section.field value ...]` asks for, checked.

    `--help` documents every field, with CONFIG's values when it is given; `--print-config` prints
    the config as JSON; both exit.

    Raises:   ConfigError for an unknown config or field, and all that `validation.check` finds.
    """
    args, program = list(argv), f"python -m {prog}"
    name = args.pop(0) if args and not args[0].startswith("-") else None
    if name is None and not asks_help(args):
        fix = f"start with a .py file or one of {known_configs()}: {program} quickstart"
        raise ConfigError("CONFIG", args[0] if args else "", "is missing", fix)
    print_config = "--print-config" in args
    args = [arg for arg in args if arg != "--print-config"]
    doc = f"{doc}\nCONFIG is a .py file, or one of {known_configs()}. --print-config shows it."
    cfg = parse_overrides(load_config(name) if name else Config(), args, f"{program} CONFIG", doc)
    check(cfg)
    if print_config:
        print(to_json(cfg), end="")
        sys.exit(guard.EXIT_OK)
    return cfg


def known_configs() -> str:
    """Names of the configs that come with the repository."""
    return ", ".join(sorted(path.stem for path in CONFIGS.glob("*.py")))


def load_config(name: str) -> Config:
    """The config of `configs/NAME.py`, or of the Python file at a path.

    A config file is code: it is imported and its `get_config()` is called. Run only your own.

    Raises:   ConfigError when there is no such file, it fails, or its get_config() returns no
              Config.
    """
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        fix = f"give a .py file, or one of {known_configs()}"
        raise ConfigError("CONFIG", name, "is no config file", fix)
    spec = importlib.util.spec_from_file_location(f"jaxpar_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _told_where(name, path):
        spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError("CONFIG", name, "has no get_config()", "see configs/quickstart.py")
    with _told_where(name, path):
        cfg = module.get_config()
    if not isinstance(cfg, Config):
        rule = f"must return a Config from get_config(), not a {type(cfg).__name__}"
        raise ConfigError("CONFIG", name, rule, "see configs/quickstart.py")
    return cfg


@contextlib.contextmanager
def _told_where(name: str, path: Path) -> Iterator[None]:
    """What a config file's code raises becomes a ConfigError that names the line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line, said = error.lineno, error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(path)]
            line, said = lines[-1] if lines else None, str(error)
        where = f"line {line} of it" if line else "it"
        rule = f"cannot be used: {where} fails: {type(error).__name__}: {' '.join(said.split())}"
        fix = f"mend {where}; configs/quickstart.py is one that works"
        raise ConfigError("CONFIG", name, rule, fix) from error


# ------------------------------------------------------------------------------- overrides


def parse_overrides(cfg: Config, args: Sequence[str], prog: str, description: str = "") -> Config:
    """The config with `--section.field value` applied; `--help` documents every field and exits.

    Raises:   ConfigError for an unknown field, a value that is missing or of the wrong type.
    """
    if asks_help(args):
        print_help(cfg, prog, description)
        sys.exit(guard.EXIT_OK)
    for path, text in _pairs(args):
        cfg = replace(cfg, **{path: _read(text, field_types()[path])})
        check_types(cfg)
    return cfg


def asks_help(args: Sequence[str]) -> bool:
    """Whether a command line holds --help."""
    return "--help" in args or "-h" in args


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(path, text) for each `--section.field text`, also with "=", and also after `--set`."""
    rest = iter(written_out(args))
    for arg in rest:
        name, given, text = arg.removeprefix("--").partition("=")
        path = name.replace("-", "_")
        if not arg.startswith("--"):
            raise ConfigError("command line", arg, "is not --section.field value", "see --help")
        if not given:
            text = next(rest, "--")
        missing = not given and text.startswith("--")
        if path not in field_types():
            raise unknown_field(path, "" if missing else text, flag)
        if missing:
            leaf = next(leaf for leaf in leaf_paths() if leaf.startswith(path))
            raise ConfigError(path, "", "needs a value", f"use {flag(leaf, default_of(leaf))}")
        yield path, text


def written_out(args: Sequence[str]) -> Iterator[str]:
    """The arguments, with `--set section.field=text ...` as `--section.field=text` each.

    Raises:   ConfigError for anything else after --set, or nothing.
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


_WORDS = {"true": True, "false": False}

#: How text becomes a value of each type that a field can have.
_READERS: Mapping[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: lambda text: _WORDS[text.lower()],
    NoneType: lambda text: {"none": None}[text.lower()],
}


def _read(text: str, hint: Any) -> Any:
    """The text as a value of a field's type; as it is when it is none, for `check_types`."""
    for option in typing.get_args(hint) or (hint,):  # the members of a union or a Literal
        if option not in _READERS and str(option) == text:
            return option
        try:
            return _READERS[option](text)
        except (KeyError, ValueError):
            continue
    return text


def print_help(cfg: Config, prog: str, description: str) -> None:
    """Every field: its flag, type, meaning and value in `cfg`; inside a None, once that is set."""
    import tyro

    description += "\n--set SECTION.FIELD=VALUE ... sets several fields."
    if cfg.model.rope_scaling is None:
        cfg = replace(cfg, **{"model.rope_scaling": RopeScaling()})
        description += "\nmodel.rope_scaling is None here; setting one of its fields turns it on."
    else:
        description += "\n--model.rope-scaling None turns it off."
    tyro.cli(
        Config,
        default=cfg,
        args=["--help"],
        prog=prog,
        description=description,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )


def run_program(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run a program's main on the command line, and end with its exit code.

    A ConfigError, too long a path or a platform that is not there becomes one line and code 2,
    Ctrl-C one and 130, no room for a file one and 1, and what other processes could not do one and
    theirs; other exceptions are shown whole.
    The process ends without Python's exit hooks: JAX would wait there for a peer that may be dead.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # of a terminal that lacks a sign, a "?"
    try:
        code, why = main(sys.argv[1:]) or guard.EXIT_OK, ""
        sys.stdout.flush()
    except BaseException as error:
        code, why = _verdict(_of_a_long_name(error))
    _leave(code, why)


def _of_a_long_name(error: BaseException) -> BaseException:
    """An error; where it is that a path on the command line is too long, as a ConfigError."""
    if not (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG):
        return error
    rule, fix = "is too long for a name", "use one of 255 bytes at most"
    return ConfigError("path", f"{str(error.filename)[:60]}...", rule, fix)


def _verdict(error: BaseException) -> tuple[int, str]:
    """Say what went wrong. Returns: the exit code that it has, and the words."""
    if "jaxpar.runtime" in sys.modules:  # else it has started no JAX
        error = sys.modules["jaxpar.runtime"].of_a_platform(error)
    why = f"{type(error).__name__}: {error}"
    match error:
        case ConfigError():
            return _say(why := f"config error: {error}", guard.EXIT_CONFIG), why
        case guard.BadNumerics():
            return _say(why := f"bad numerics: {error}", guard.EXIT_NUMERICS), why
        case guard.RunError():
            return _say(why := f"error: {error}", guard.EXIT_ERROR), why
        case KeyboardInterrupt():
            return _say(why := "interrupted", guard.EXIT_INTERRUPTED), why
        case BrokenPipeError():
            why = "error: whatever read the output has closed it"
            return _say(why, guard.EXIT_ERROR), why
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            file = f" for {error.filename}" if error.filename else ""  # a write has no name
            why = f"error: {error.strerror}{file}. Free space, and start the same command again"
            return _say(why, guard.EXIT_ERROR), why
        case SystemExit():
            return _code_of(error), why
    processes = sys.modules.get("jaxpar.processes")  # else it has started no JAX, and has no peers
    if processes and isinstance(error, processes.PeerFailed | processes.PeersMissing):
        # What another process could not do has its code: this one is not at fault.
        code = getattr(error, "code", guard.EXIT_ERROR)
        return _say(why := f"error: {error}", code), why
    traceback.print_exception(error)
    return guard.EXIT_ERROR, why


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """With several processes, an exception within ends this one here, and nothing is tidied up.

    A save under way, say, would be waited for, and would wait for a process that is dead. Bad
    numerics and spikes of the loss come to all of them alike, and go on as with one process.
    """
    from jaxpar import processes

    try:
        yield
    except BaseException as error:
        alike = isinstance(error, guard.BadNumerics | guard.Spike)
        if processes.count() == 1 or alike:
            raise
        _leave(*_verdict(error))


def _leave(code: int, why: str) -> NoReturn:
    """End this process; write why, and part from the others, if there are any."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if "jaxpar.processes" in sys.modules:  # else it has started no JAX
        from jaxpar import processes, watchdog

        well = code in (guard.EXIT_OK, guard.EXIT_PREEMPTED)
        if not well and code != guard.EXIT_CONFIG:  # what is refused writes nothing
            with contextlib.suppress(OSError):
                watchdog.last_words(code, why)
        processes.part(well)
    os._exit(code)


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def _code_of(stop: SystemExit) -> int:
    """As Python would end: None is success, text is printed and is an error."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or guard.EXIT_OK
    return _say(str(stop.code), guard.EXIT_ERROR)
