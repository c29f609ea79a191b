"""The error for an invalid config value."""

from typing import Any

from jaxpar.config.printable import printable

#: Maximum characters of each part of a message.
MAX_PART = 2000


class ConfigError(ValueError):
    """An invalid config value. Names the field, its value, the rule and a fix."""

    def __init__(self, field: str, value: Any, rule: str, fix: str):
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        field, shown, rule, fix = map(_short, (field, repr(value), rule, fix))
        super().__init__(printable(f"{field} = {shown}: {rule}. Fix: {fix}."))


def _short(text: str) -> str:
    """Leave out the middle of a long text, such as a name from a damaged file."""
    half = MAX_PART // 2
    return text if len(text) <= MAX_PART else f"{text[:half]} ... {text[-half:]}"
