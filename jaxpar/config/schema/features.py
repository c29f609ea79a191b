"""The sections that files of `jaxpar/features/` declare."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from jaxpar.config.metrics import declare

#: They are above all other packages, which know their names from the config alone.
PACKAGE = "jaxpar.features"


def _declared() -> dict[str, Any]:
    """Return the class of each section by its name."""
    folder = importlib.import_module(PACKAGE).__path__
    names = sorted(module.name for module in pkgutil.iter_modules(folder))
    found = [importlib.import_module(f"{PACKAGE}.{name}").SECTION for name in names]
    return {cls.section: cls for cls in found}


#: The class of each section by its name.
SECTIONS: dict[str, Any] = _declared()

for _cls in SECTIONS.values():
    declare(_cls.metrics)
    if getattr(_cls, "evaluates", False):
        for _name, _metric in _cls.metrics.items():
            _text = f"{_name} of held-out {_cls.dataset or 'text'}"
            _metric = _metric._replace(group="evaluation", meaning=_text)
            declare({f"held_out_{_name}": _metric})


def with_sections(after: str) -> Callable[[type], type]:
    """Return the decorator that adds the sections to the fields of `Config`: None by default.

    Args:     after: the field that they follow.
    """

    def add(cls: type) -> type:
        fields = dict(cls.__annotations__)
        at = [*fields].index(after) + 1
        own = {name: of | None for name, of in SECTIONS.items()}
        cls.__annotations__ = dict([*fields.items()][:at]) | own | dict([*fields.items()][at:])
        for name in own:
            setattr(cls, name, None)
        return cls

    return add


def paths_of_features(which: str = "paths") -> list[str]:
    """Return the fields of sections that hold a path, or which="addresses", also an address."""
    return [f"{n}.{field}" for n, cls in SECTIONS.items() for field in getattr(cls, which, ())]


def objectives() -> dict[str, Any]:
    """Return the sections of objectives."""
    return {name: cls for name, cls in SECTIONS.items() if hasattr(cls, "evaluates")}


def objective_in(cfg: Any) -> Any:
    """Return the `Objective` of a config (`jaxpar/objectives/`); None if it trains tokens."""
    found = [value for name in objectives() if (value := getattr(cfg, name)) is not None]
    if hasattr(cfg.train.loss, "section"):
        found.append(cfg.train.loss)
    return found[0] if found else None
