"""A section of the config that a file of `jaxpar/features/` declares."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jaxpar.config.metrics import Metric

if TYPE_CHECKING:
    from jaxpar.config import Config
    from jaxpar.config.condition import Condition
    from jaxpar.config.incompatible import Incompatible


class ConfigSection:
    """Base of the classes of such sections: frozen dataclasses, None by default.

    Fields are options, with the documentation below them. What is said of them here needs no JAX.
    """

    section: ClassVar[str] = ""
    """Its name."""
    metrics: ClassVar[dict[str, Metric]] = {}
    """The metrics that it adds to those of a step."""
    has_state: ClassVar[bool] = False
    """Whether it has arrays like the parameters in the state."""
    scopes: ClassVar[tuple[str, ...]] = ()
    """Names that it uses in `jax.named_scope`."""
    paths: ClassVar[tuple[str, ...]] = ()
    """Its fields that hold a path."""
    addresses: ClassVar[tuple[str, ...]] = ()
    """Those of `paths` that may hold the address of an object in a store."""

    def check(self, cfg: "Config", path: str) -> None:
        """Raise ConfigError if the config that has it does not go with it."""

    @classmethod
    def is_set(cls) -> "Condition":
        """The condition that a config has it, for `incompatible`."""
        from jaxpar.config.condition import changed, enabled

        return enabled(cls.section) if cls.section else changed("train.loss")

    @classmethod
    def incompatible(cls) -> "tuple[Incompatible, ...]":
        """Return what it cannot be combined with."""
        return ()

    @classmethod
    def excludes(cls, others: "Mapping[Condition, str]") -> "tuple[Incompatible, ...]":
        """Return rows of `incompatible`: each condition, and why."""
        from jaxpar.config.incompatible import Incompatible

        return tuple(Incompatible(one, cls.is_set(), why) for one, why in others.items())

    def option(self, field: str, value: Any) -> str:
        """Return how a user gives a field a value, for the fix of an error."""
        from jaxpar.config import flag

        if self.section:
            return flag(f"{self.section}.{field}", value)
        return f"{type(self).__name__}({field}={value!r})"
