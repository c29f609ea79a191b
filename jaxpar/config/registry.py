"""Register update rules and attention functions from outside the package, for experiments.

A config file or a notebook registers a function under a name and sets the field to that name:

    registry.add("optimizer.name", "cautious", make_rule)
    registry.add("model.attention", "capped", capped_attention)

The config then works like any other: it is checked, saved, trained on every mesh, and resumed. A
run's config.json contains the name, never code; programs that read the run need the function
registered again.

The functions have these signatures:

    optimizer.name    rule(cfg: OptimizerConfig, rate: optax.Schedule, mask) returns an optax
                      GradientTransformation. It must be elementwise, since each device updates its
                      own shards. Its moments have the shapes of all or some parameters
                      (`optax.masked`, `optax.partition`); those named mu, trace and nu can be
                      stored in bfloat16. mask: where weight decay applies.
                      With `needs="matrices"`, it is rule(cfg, rate, mask, matrices), and can apply
                      functions to whole matrices by `Matrices.map` (optimizer/matrices.py).
    model.attention   function(q, k, v, mask: AttentionMask) returns out. q, out: [B, T, H, K]. k,
                      v: [B, S, G, K]. All have the same dtype. H and G are the heads of one tensor
                      rank, and S has every position that a query may see. JAX differentiates the
                      function; the reference model also calls it.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from jaxpar.config import ConfigError
from jaxpar.config.fields import field_types
from jaxpar.config.values import Value

#: What an update rule has to see of the parameters.
type Needs = Literal["elements", "matrices"]

_ADDED: dict[str, dict[str, Callable[..., Any]]] = {"optimizer.name": {}, "model.attention": {}}
_NEEDS: dict[str, Needs] = {}


def add(path: str, name: str, function: Callable[..., Any], *, needs: Needs = "elements") -> None:
    """Register a function as the value `name` of the field `path`. A later one replaces it.

    The function's result is checked at each call.

    Args:     needs: for an update rule, whether it is elementwise or needs whole matrices.
    Raises:   ConfigError for a field without registered functions, a built-in name, or an object
              that is not callable; and for `needs` that is none, or is set for another field.
    """
    if path not in _ADDED:
        fix = f"use one of {', '.join(_ADDED)}"
        raise ConfigError("registry.add", path, "does not accept registered functions", fix)
    if name in _built_in(path):
        raise ConfigError(path, name, "is a built-in name", "choose another name")
    if not callable(function):
        fix = "pass a function"
        raise ConfigError(path, name, f"is registered as {function!r}, not as a function", fix)
    if needs not in get_args(Needs.__value__) or (path != "optimizer.name" and needs != "elements"):
        rule = f"is registered with needs={needs!r}"
        fix = 'update rules may have needs="elements" or "matrices", other functions have none'
        raise ConfigError(path, name, rule, fix)
    _ADDED[path][name] = _checked(path, name, function)
    if path == "optimizer.name":
        _NEEDS[name] = needs


def needs(name: Any) -> Needs:
    """Return what an update rule from outside needs."""
    return getattr(name, "needs", None) or _NEEDS[name]


def _built_in(path: str) -> tuple[str, ...]:
    if path == "model.attention":
        return ("softmax",)
    hint = field_types()[path]
    names = hint if get_origin(hint) is Literal else get_args(hint)[0]
    return get_args(names)


def _checked(path: str, name: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to raise a ConfigError if it returns a wrong result."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        made = function(*args)
        wanted, fits = _of_rule(made) if path == "optimizer.name" else _of_attention(made, args[0])
        if not fits:
            told = f"{made.dtype} {made.shape}" if hasattr(made, "dtype") else type(made).__name__
            raise ConfigError(path, name, f"returns {told} instead of {wanted}", "return that")
        return made

    return run


def _of_rule(made: Any) -> tuple[str, bool]:
    """Return the expected result of a rule, and whether `made` is one."""
    fits = all(callable(getattr(made, part, None)) for part in ("init", "update"))
    return "an optax.GradientTransformation", fits


def _of_attention(made: Any, q: Any) -> tuple[str, bool]:
    fits = getattr(made, "shape", None) == q.shape and getattr(made, "dtype", None) == q.dtype
    return f"one array like q, {q.dtype} {q.shape}", fits


def function(path: str, name: Any) -> Callable[..., Any] | None:
    """Return the function of a field: a value of a user's class, or what is registered under a
    name; None for a built-in name.

    Raises:   ConfigError if there is none.
    """
    if isinstance(name, Value):
        own: Any = name
        return _checked(path, name, own)
    if name in _built_in(path):
        return None
    if name not in _ADDED[path]:
        raise ConfigError(path, name, "is not registered", f'call registry.add("{path}", ...)')
    return _ADDED[path][name]


def names(path: str) -> tuple[str, ...]:
    """Return the names registered for a field."""
    return tuple(_ADDED.get(path, ()))


def fields() -> tuple[str, ...]:
    """Return the fields that accept registered functions."""
    return tuple(_ADDED)
