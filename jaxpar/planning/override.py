"""The chosen layout as something `jaxpar.train` takes: a command line, or a config file."""

from typing import Any

from jaxpar.config import Config, flag, leaf_paths, value_of


def changes(base: Config, chosen: Config) -> dict[str, Any]:
    """The fields of `chosen` that differ from `base`, by path."""
    found = {}
    for path in leaf_paths():
        try:
            then, now = value_of(base, path), value_of(chosen, path)
        except AttributeError:  # within a section that is None
            continue
        if then != now:
            found[path] = now
    return found


def command_line(name: str, base: Config, chosen: Config) -> str:
    """The command that trains with the layout."""
    words = [flag(path, value) for path, value in changes(base, chosen).items()]
    return " ".join([f"python -m jaxpar.train {name}", *words])


def config_file(name: str, base: Config, chosen: Config, said: str) -> str:
    """A config file that takes `name` and changes these fields.

    Args:     said: one line on where the layout is from.
    """
    lines = [f'            "{path}": {value!r},' for path, value in changes(base, chosen).items()]
    body = "\n".join(lines)
    return f'''"""{said}"""

from jaxpar.cli import load_config
from jaxpar.config import Config, replace


def get_config() -> Config:
    return replace(
        load_config({name!r}),
        **{{
{body}
        }},
    )
'''
