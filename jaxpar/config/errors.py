"""The error for an invalid config value, and for a package that it needs."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from jaxpar.config.listed import is_list, written
from jaxpar.config.printable import printable

#: Maximum characters of each part of a message.
MAX_PART = 2000


class ConfigError(ValueError):
    """An invalid config value. Names the field, its value, the rule and a fix."""

    def __init__(self, field: str, value: Any, rule: str, fix: str):
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        field, text, rule, fix = map(_short, (field, shown(value), rule, fix))
        super().__init__(printable(f"{field} = {text}: {rule}. Fix: {fix}."))

    def __reduce__(self) -> tuple:
        return type(self), (self.field, self.value, self.rule, self.fix)


class ConfigErrors(ConfigError):
    """Several invalid values. Its field, value, rule and fix are those of the first."""

    def __init__(self, errors: Sequence[ConfigError]):
        self.errors, first = tuple(errors), errors[0]
        super().__init__(first.field, first.value, first.rule, first.fix)
        lines = (f"\n{number}. {error}" for number, error in enumerate(errors, 1))
        self.args = (f"{len(errors)} rules are broken." + "".join(lines),)

    def __reduce__(self) -> tuple:
        return type(self), (self.errors,)


def joined(errors: Sequence[ConfigError]) -> ConfigError:
    """Return errors as one."""
    return errors[0] if len(errors) == 1 else ConfigErrors(errors)


def shown(value: Any) -> str:
    """Return a value for a message: a list as on a command line."""
    return repr(written(value) if is_list(value) else value)


def _short(text: str) -> str:
    """Leave out the middle of a long text, such as a name from a damaged file."""
    half = MAX_PART // 2
    return text if len(text) <= MAX_PART else f"{text[:half]} ... {text[-half:]}"


def require_package(
    name: str, field: str, value: Any, otherwise: str = "", module: str = ""
) -> None:
    """Check that an optional package is installed.

    The fix names the package rather than an extra of jaxpar, so that it works for a checkout and
    for a wheel.

    Args:     name: the name for pip; the module has underscores for dashes. field, value: the
              setting that needs the package. otherwise: an alternative fix. module: its module, if
              it has another name.
    Raises:   ConfigError if it is not installed.
    """
    if importlib.util.find_spec(module or name.replace("-", "_")) is None:
        fix = f"run pip install {name}" + (f", or {otherwise}" if otherwise else "")
        raise ConfigError(field, value, f"needs {name}, which is not installed", fix)
