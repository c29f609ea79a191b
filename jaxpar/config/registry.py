"""Functions that a config may choose by name, added from outside the package: for experiments.

A config file, or a notebook, adds a function under a name, and gives the field that name:

    registry.add("optimizer.name", "cautious", make_rule)
    registry.add("model.attention", "capped", capped_attention)

From there on the config is like any other: checked, saved, trained on every mesh, resumed. A run's
config.json holds the name, never code; whatever reads the run needs the function added again.

What is added must be

    optimizer.name    rule(cfg: OptimizerConfig, rate: optax.Schedule, mask) -> an optax
                      GradientTransformation, elementwise, since each device updates its own
                      shards; moments shaped as the parameters, of all or of some (`optax.masked`,
                      `optax.partition`), of which those called mu or trace, and nu, may be kept
                      in bfloat16. mask: where weight decay applies.
    model.attention   function(q, k, v, mask: AttentionMask) -> out. q, out: [B, T, H, K]. k, v:
                      [B, S, G, K]. All of one dtype. H and G: one tensor rank's heads; every
                      position that a query may see is there. Differentiated by JAX; the reference
                      model calls it too.
"""

import functools
from collections.abc import Callable
from typing import Any, get_args

from jaxpar.config import ConfigError
from jaxpar.config.fields import field_types

_ADDED: dict[str, dict[str, Callable[..., Any]]] = {"optimizer.name": {}, "model.attention": {}}


def add(path: str, name: str, function: Callable[..., Any]) -> None:
    """Let the field `path` have the value `name`. Added again, the later function counts.

    Raises:   ConfigError for a field that takes none, a name that the package has itself, or what
              is no function. What a function gives is checked when it is used.
    """
    if path not in _ADDED:
        fix = f"name one of {', '.join(_ADDED)}"
        raise ConfigError("registry.add", path, "is no field that functions can be added to", fix)
    if name in get_args(field_types()[path]):
        raise ConfigError(path, name, "is a name of the package's own", "choose another name")
    if not callable(function):
        fix = "give the function itself"
        raise ConfigError(path, name, f"is added as {function!r}, which is no function", fix)
    _ADDED[path][name] = _checked(path, name, function)


def _checked(path: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for an error of one line where it gives something else than it must."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        made = function(*args)
        wanted, fits = _of_rule(made) if path == "optimizer.name" else _of_attention(made, args[0])
        if not fits:
            told = f"{made.dtype} {made.shape}" if hasattr(made, "dtype") else type(made).__name__
            raise ConfigError(path, name, f"gives {told}, and must give {wanted}", "return that")
        return made

    return run


def _of_rule(made: Any) -> tuple[str, bool]:
    """What a rule must give, and whether it is that."""
    fits = all(callable(getattr(made, part, None)) for part in ("init", "update"))
    return "an optax.GradientTransformation", fits


def _of_attention(made: Any, q: Any) -> tuple[str, bool]:
    fits = getattr(made, "shape", None) == q.shape and getattr(made, "dtype", None) == q.dtype
    return f"out alone, as q: {q.dtype} {q.shape}", fits


def function(path: str, name: str) -> Callable[..., Any] | None:
    """What was added to the field under the name; None for the package's own.

    Raises:   ConfigError when nothing was: a config that was not checked.
    """
    if name in get_args(field_types()[path]):
        return None
    if name not in _ADDED[path]:
        raise ConfigError(path, name, "is unknown here", f'call registry.add("{path}", ...)')
    return _ADDED[path][name]


def names(path: str) -> tuple[str, ...]:
    """The names that were added to a field; none for most fields."""
    return tuple(_ADDED.get(path, ()))


def fields() -> tuple[str, ...]:
    """The fields that functions can be added to."""
    return tuple(_ADDED)
