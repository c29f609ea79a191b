"""The references of a kernel, by name."""

from typing import Any


class Refs:
    """References by name."""

    def __init__(self, **refs: Any):
        self.__dict__.update(refs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this kernel has no {name}")
