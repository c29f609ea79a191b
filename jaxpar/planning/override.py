"""Writes the chosen layout as a command line or config file for `jaxpar.train`."""

import shlex
from pathlib import Path
from typing import Any

from jaxpar.config import Config, flag, value_of
from jaxpar.config.config_file import known_configs
from jaxpar.config.fields import leaf_paths


def changes(base: Config, chosen: Config) -> dict[str, Any]:
    """Return the fields of `chosen` that differ from `base`, by path.

    If a section is None only in `base`, the result has all its fields. If it is None only in
    `chosen`, the result has the section itself.
    """
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
    """Return the command that trains with the layout."""
    words = [flag(path, value) for path, value in changes(base, chosen).items()]
    return " ".join([f"python -m jaxpar.train {shlex.quote(name)}", *words])


def config_file(name: str, base: Config, chosen: Config, said: str) -> str:
    """Return a config file that loads `name` and changes these fields.

    Args:     said: the file's docstring: one line about the layout's origin.
    """
    # An absolute path, so that the new file works from any folder.
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
