"""--fix of the planner: fields of a layout that keep a value."""

from typing import Any

from jaxpar.config import Config, ConfigError, flag, layout_fields, replace
from jaxpar.config.rules.memory import remat
from jaxpar.config.type_check import check_types


def read_fixed(text: str | None, cfg: Config) -> dict[str, Any]:
    """tensor=2,zero=3 -> {"tensor": 2, "zero": 3}.

    Args:     cfg: gives the other fields, for the rules of one field.
    Raises:   ConfigError for a field that a layout does not set or that is named twice, or a value
              that it cannot have.
    """
    fixed: dict[str, Any] = {}
    for pair in _pairs(text or ""):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if name not in layout_fields.FIELDS or not equals:
            rule = f"must be FIELD=VALUE with a field of {', '.join(layout_fields.FIELDS)}"
            raise ConfigError("--fix", pair, rule, "use --fix tensor=2,zero=3")
        if name in fixed:
            raise ConfigError("--fix", text, f"names {name} twice", f"use --fix {pair}")
        fixed[name] = _value(cfg, pair, name, value)
    return fixed


def _pairs(text: str) -> list[str]:
    """The items FIELD=VALUE. A piece without "=" goes on with the value before it, as the names of
    remat=attn_out,attn_lse do."""
    found: list[str] = []
    for piece in map(str.strip, text.split(",") if text else []):
        if "=" in piece or not found:
            found.append(piece)
        else:
            found[-1] += f",{piece}"
    return found


def _value(cfg: Config, pair: str, name: str, text: str) -> str | int:
    """A field's value, which some layout can have as far as the field's own rules say."""
    if name != "remat" and not (text.isdecimal() and int(text) > 0):
        rule = f"{name} must be a whole number above 0"
        raise ConfigError("--fix", pair, rule, f"use --fix {name}=1")
    path, value = f"parallel.{name}", text if name == "remat" else int(text)
    try:
        changed = replace(cfg, **{path: value})
        check_types(changed)
        remat(changed)
    except ConfigError as error:
        fix = error.fix.replace(flag(path) + " ", f"--fix {name}=")
        raise ConfigError("--fix", pair, f"{name} {error.rule}", fix) from error
    return value
