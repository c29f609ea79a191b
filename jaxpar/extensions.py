"""Functions that a config may choose by name, added from outside the package: for experiments.

A config file, or a notebook, adds a function under a name, and gives the field that name:

    extensions.add("optimizer.name", "cautious", make_rule)
    extensions.add("model.attention", "capped", capped_attention)

From there on the config is like any other: checked, saved, trained on every mesh, resumed. A run's
config.json holds the name, never code; whatever reads the run needs the function added again.

What is added must be

    optimizer.name    rule(cfg: OptimizerConfig, rate: optax.Schedule, mask) -> an optax
                      GradientTransformation, elementwise, since each device updates its own
                      shards; moments shaped as the parameters, of which those called mu or trace,
                      and nu, may be kept in bfloat16. mask: where weight decay applies.
    model.attention   function(q, k, v, mask: AttentionMask) -> out. q, out: [B, T, H, K]. k, v:
                      [B, S, G, K]. H and G: one tensor rank's heads; every position that a query
                      may see is there. Differentiated by JAX; the reference model calls it too.
"""

from collections.abc import Callable
from typing import Any, get_args

from jaxpar.config import ConfigError, field_types

_ADDED: dict[str, dict[str, Callable[..., Any]]] = {"optimizer.name": {}, "model.attention": {}}


def add(path: str, name: str, function: Callable[..., Any]) -> None:
    """Let the field `path` have the value `name`. Added again, the later function counts.

    Raises:   ConfigError for a field that takes none, or a name that the package has itself.
    """
    if path not in _ADDED:
        fix = f"name one of {', '.join(_ADDED)}"
        raise ConfigError("extensions.add", path, "is no field that functions can be added to", fix)
    if name in get_args(field_types()[path]):
        raise ConfigError(path, name, "is a name of the package's own", "choose another name")
    _ADDED[path][name] = function


def function(path: str, name: str) -> Callable[..., Any] | None:
    """What was added to the field under the name; None for the package's own.

    Raises:   ConfigError when nothing was: a config that was not checked.
    """
    if name in get_args(field_types()[path]):
        return None
    if name not in _ADDED[path]:
        raise ConfigError(path, name, "is unknown here", f'call extensions.add("{path}", ...)')
    return _ADDED[path][name]


def names(path: str) -> tuple[str, ...]:
    """The names that were added to a field; none for most fields."""
    return tuple(_ADDED.get(path, ()))


def fields() -> tuple[str, ...]:
    """The fields that functions can be added to."""
    return tuple(_ADDED)
