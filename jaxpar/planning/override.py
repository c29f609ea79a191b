"""The chosen layout as something `jaxpar.train` takes: a command line, or a config file."""

import shlex
from pathlib import Path
from typing import Any

from jaxpar.config import Config, flag, value_of
from jaxpar.config.config_file import known_configs
from jaxpar.config.fields import leaf_paths


def changes(base: Config, chosen: Config) -> dict[str, Any]:
    """The fields of `chosen` that differ from `base`, by path. Of a section that is None in only
    one of them: all its fields, or the section itself as None."""
    found: dict[str, Any] = {}
    for path in leaf_paths():
        section = path.rpartition(".")[0]
        before, after = value_of(base, section), value_of(chosen, section)
        if after is None and before is not None:
            found[section] = None
        elif after is not None:
            now = value_of(chosen, path)
            if before is None or now != value_of(base, path):
                found[path] = now
    return found


def command_line(name: str, base: Config, chosen: Config) -> str:
    """The command that trains with the layout."""
    words = [flag(path, value) for path, value in changes(base, chosen).items()]
    return " ".join([f"python -m jaxpar.train {shlex.quote(name)}", *words])


def config_file(name: str, base: Config, chosen: Config, said: str) -> str:
    """A config file that takes `name` and changes these fields.

    Args:     said: one line on where the layout is from.
    """
    # A file, or a run, is found from wherever the new one is used.
    source = name if name in known_configs().split(", ") else str(Path(name).resolve())
    lines = [f'            "{path}": {value!r},' for path, value in changes(base, chosen).items()]
    body = "\n".join(lines)
    return f'''"""{said}"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config({source!r}),
        **{{
{body}
        }},
    )
'''
