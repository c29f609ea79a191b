"""Fields of a layout: those that --fix sets, parsed, and those that a plan changes, written."""

import itertools
import shlex
from pathlib import Path
from typing import Any

from jaxpar.components.experts import num_experts
from jaxpar.config import Config, ConfigError, flag, layers, replace, value_of
from jaxpar.config.addresses import changes_of_layers
from jaxpar.config.config_file import known_configs
from jaxpar.config.fields import field_types, leaf_paths
from jaxpar.config.layout import fields as layout_fields
from jaxpar.config.listed import Item, read_value
from jaxpar.config.numerals import only_digits
from jaxpar.config.rules.divisibility import largest_divisor
from jaxpar.config.rules.memory import remat
from jaxpar.config.rules.type_check import check_type

# -------------------------------- Parses the planner's --fix: fields of a layout with a fixed value


def read_fixed(text: str | None, cfg: Config) -> dict[str, Any]:
    """Parse tensor=2,zero=3 into {"tensor": 2, "zero": 3}.

    With DiLoCo, the number of replicas decides what is computed: it is the config's, unless `text`
    fixes another.

    Args:     cfg: the config whose fields are fixed, to check the values.
    Raises:   ConfigError for an unknown or repeated field, or an invalid value.
    """
    fixed: dict[str, Any] = {}
    for pair in _pairs(text or ""):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if name not in layout_fields.FIELDS or not equals:
            rule = f"must be FIELD=VALUE, with FIELD one of {', '.join(layout_fields.FIELDS)}"
            raise ConfigError("--fix", pair, rule, "use --fix tensor=2,zero=3")
        if name in fixed:
            raise ConfigError("--fix", text, f"names {name} twice", f"use --fix {pair}")
        fixed[name] = _value(cfg, pair, name, value)
    if cfg.diloco:
        fixed.setdefault("replica", cfg.parallel.replica)
    return fixed


def _pairs(text: str) -> list[str]:
    """Split the items FIELD=VALUE.

    An item without "=" continues the previous value, as in remat=attn_out,attn_lse.
    """
    found: list[str] = []
    for piece in map(str.strip, text.split(",") if text else []):
        if "=" in piece or not found:
            found.append(piece)
        else:
            found[-1] += f",{piece}"
    return found


def _value(cfg: Config, pair: str, name: str, text: str) -> Any:
    """Parse a field's value and check it by the rules for that field."""
    if name != "remat" and not (only_digits(text) and int(text) > 0):
        rule = f"{name} must be a positive integer"
        raise ConfigError("--fix", pair, rule, f"use --fix {name}=1")
    path = f"parallel.{name}"
    value = read_value(text, field_types()[path])
    if name == "expert":
        _check_experts(cfg, pair, int(text))
    try:
        check_type(path, value)
        remat(replace(cfg, **{path: value}))
    except ConfigError as error:
        fix = error.fix.replace(flag(path) + " ", f"--fix {name}=")
        raise ConfigError("--fix", pair, f"{name} {error.rule}", fix) from error
    return value


def _check_experts(cfg: Config, pair: str, size: int) -> None:
    """Check that an expert axis splits the experts equally, if the model has any."""
    experts = num_experts(cfg.model)
    if experts % size:
        rule = f"must divide the {experts} experts of a layer: devices get equal numbers"
        fits = largest_divisor(experts, min(size, experts))
        raise ConfigError("--fix", pair, f"expert {rule}", f"use --fix expert={fits}")


# --------------------- Writes the chosen layout as a command line or config file for `jaxpar.train`


def changes(base: Config, chosen: Config) -> dict[str, Any]:
    """Return the fields of `chosen` that differ from `base`, by path.

    If a section is None only in `base`, the result has all its fields. If it is None only in
    `chosen`, the result has the section itself.
    """
    found = changes_of_layers(base, chosen)
    for path in leaf_paths():
        if path == layers.FIELD:
            continue
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
    changed = changes(base, chosen)
    body = "\n".join(f'            "{path}": {value!r},' for path, value in changed.items())
    lists = (value for value in changed.values() if isinstance(value, tuple))
    items = {type(one).__name__ for one in itertools.chain(*lists) if isinstance(one, Item)}
    names = ", ".join(["Config", *sorted(items), "replace"])
    return f'''"""{said}"""

from jaxpar.config import {names}
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config({source!r}),
        **{{
{body}
        }},
    )
'''
