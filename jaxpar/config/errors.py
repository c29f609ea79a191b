"""The error for an invalid config value."""

from typing import Any

from jaxpar.config.printable import printable


class ConfigError(ValueError):
    """An invalid config value. Names the field, its value, the rule and a fix."""

    def __init__(self, field: str, value: Any, rule: str, fix: str):
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        super().__init__(printable(f"{field} = {value!r}: {rule}. Fix: {fix}."))
