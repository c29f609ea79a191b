"""Parses the planner's --fix: fields of a layout with a fixed value."""

from typing import Any

from jaxpar.config import Config, ConfigError, flag, replace
from jaxpar.config.layout import fields as layout_fields
from jaxpar.config.numerals import only_digits
from jaxpar.config.rules.divisibility import largest_divisor
from jaxpar.config.rules.memory import remat
from jaxpar.config.rules.type_check import check_types


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
    if cfg.diloco.every:
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


def _value(cfg: Config, pair: str, name: str, text: str) -> str | int:
    """Parse a field's value and check it by the rules for that field."""
    if name != "remat" and not (only_digits(text) and int(text) > 0):
        rule = f"{name} must be a positive integer"
        raise ConfigError("--fix", pair, rule, f"use --fix {name}=1")
    path, value = f"parallel.{name}", text if name == "remat" else int(text)
    if name == "expert":
        _check_experts(cfg, pair, int(text))
    try:
        changed = replace(cfg, **{path: value})
        check_types(changed)
        remat(changed)
    except ConfigError as error:
        fix = error.fix.replace(flag(path) + " ", f"--fix {name}=")
        raise ConfigError("--fix", pair, f"{name} {error.rule}", fix) from error
    return value


def _check_experts(cfg: Config, pair: str, size: int) -> None:
    """Check that an expert axis splits the experts equally, if the model has any."""
    experts = cfg.model.num_experts
    if experts % size:
        rule = f"must divide model.num_experts = {experts}: devices get equal numbers of experts"
        fits = largest_divisor(experts, min(size, experts))
        raise ConfigError("--fix", pair, f"expert {rule}", f"use --fix expert={fits}")
