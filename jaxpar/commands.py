"""The commands of jaxpar: one table, of which help, completion, docs and tests are made.

A command is a module `jaxpar/NAME.py`, or `jaxpar/NAME/__main__.py`, that has

    OPTIONS             a dataclass of options, or several by name (`config/options.py`)
    main(options)       does the work, and returns the exit code, or None for 0
    its docstring       the text of --help

and imports what takes long, such as JAX, only in `main`: a wrong option is answered before.
"""

import difflib
import functools
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from jaxpar.config import Config, ConfigError, Model
from jaxpar.config.config_file import known_configs
from jaxpar.config.fields import flag, leaf_paths
from jaxpar.config.option_fields import config_field, declared
from jaxpar.config.options import read_options
from jaxpar.runtime.program import run_program

#: The commands and their descriptions, in groups. `jaxpar NAME` is `python -m jaxpar.NAME`.
GROUPS = {
    "train": {
        "train": "train a model, or resume a run; `train quickstart` is a first run",
        "launch": "train with several processes or hosts, and restart them after a failure",
        "sweep": "train at every point of a grid, and rank the runs",
    },
    "prepare": {
        "data": "tokenize text and chats into datasets",
        "plan": "predict the memory and speed of every layout of a config, without a GPU",
        "convert": "import and export published models and adapters",
    },
    "use a model": {
        "sample": "generate text with the model of a run, or talk with it: --chat",
        "evaluate": "score the model of a run on text and on tasks",
    },
    "look at runs": {
        "report": "write an HTML report of runs, or list them, the best one first: --list",
        "checkpoint": "list, verify and average checkpoints; branch a run; replay a step",
        "profile": "show where the time and memory of a step go; measure a config: --bench",
    },
    "check": {
        "doctor": "check whether this machine is ready for training",
        "certify": "compare meshes with the reference model; two runs: --bisect; µP: --mup",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}


def help_text(called: str) -> str:
    """Return the list of commands, in groups.

    Args:     called: "jaxpar" or "python -m jaxpar".
    """
    text = f"usage: {called} COMMAND [options]\n\n"
    for title, commands in GROUPS.items():
        lines = [f"  {name:<12}{line}\n" for name, line in commands.items()]
        text += f"{title}:\n{''.join(lines)}\n"
    text += f"{called} COMMAND --help shows the options of a command,\n"
    return f"{text}{called} --help PAGE a page of the documentation, such as data or configuration."


def unknown_command(name: str, called: str) -> ConfigError:
    """Return the error for a name that is not a command."""
    parts = {config: f"train {config}" for config in known_configs().split(", ")}
    for command in COMMANDS:
        parts |= {part.lstrip("-"): f"{command} {part}" for part in names_of_forms(command)}
    known = parts | {command: command for command in COMMANDS}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    fix = f"use {called} {known[near[0]]}" if near else f"use one of {', '.join(COMMANDS)}"
    return ConfigError("COMMAND", name, "is not a command of jaxpar", fix)


def names_of_forms(name: str) -> list[str]:
    """Return the subcommands of a command, or its uses, such as --chat."""
    forms = module_of(name).OPTIONS
    return [part for part in forms if part] if isinstance(forms, dict) else []


def module_of(name: str) -> ModuleType:
    """Import the module of a command."""
    is_package = (Path(__file__).parent / name / "__main__.py").is_file()
    return importlib.import_module(f"jaxpar.{name}.__main__" if is_package else f"jaxpar.{name}")


def read(name: str, argv: Sequence[str]) -> object:
    """Read the command line of a command, without running it.

    Raises:   ConfigError for a wrong option.
    """
    module = module_of(name)
    return read_options(module.OPTIONS, argv, f"python -m jaxpar.{name}", module.__doc__)


def call(name: str, argv: Sequence[str]) -> int | None:
    """Run a command in this process. Returns its exit code; None is 0."""
    return module_of(name).main(read(name, argv))


def run(module: str) -> NoReturn:
    """Run the command whose module is the program of this process, and end the process.

    Args:     module: its `__name__`, "__main__".
    """
    spec = sys.modules[module].__spec__
    assert spec is not None
    name = spec.name.removesuffix(".__main__").rpartition(".")[2]
    run_program(functools.partial(_call_here, sys.modules[module], name))


def _call_here(module: ModuleType, name: str, argv: Sequence[str]) -> int | None:
    options = read_options(module.OPTIONS, argv, f"python -m jaxpar.{name}", module.__doc__)
    return module.main(options)


def completions(line: str) -> list[str]:
    """Return what can follow a line `jaxpar COMMAND ...`, for a shell's completion.

    In bash, and in zsh after `bashcompinit`: complete -o default -C 'jaxpar --complete' jaxpar
    """
    *before, word = line.split(" ")
    if len(before) < 2:
        return [name for name in (*COMMANDS, "--help", "--version") if name.startswith(word)]
    if before[1] not in COMMANDS:
        return []
    forms = module_of(before[1]).OPTIONS
    named = forms if isinstance(forms, dict) else {"": forms}
    chosen = [form for name, form in named.items() if name and name in before]
    form = chosen[0] if chosen else named.get("")
    found = [] if chosen else [name for name in named if name]
    if form is not None:
        found += ["--help", *(one.name for one in declared(form) if not one.argument)]
        if config_field(form):
            found += known_configs().split(", ") + [flag(path) for path in leaf_paths()]
    return sorted(name for name in found if name.startswith(word))


def model_from(named: str, family: str | None, like: Model) -> Model:
    """`jaxpar.convert.shape.model_from`, which imports JAX."""
    from jaxpar.convert import shape

    return shape.model_from(named, family, like)


def with_vocabulary(cfg: Config) -> Config:
    """`jaxpar.training.vocabulary.with_vocabulary`, which imports JAX."""
    if cfg.model.vocab_size:
        return cfg
    from jaxpar.training import vocabulary

    return vocabulary.with_vocabulary(cfg)
