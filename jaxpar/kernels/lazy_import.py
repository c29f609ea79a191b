"""Imports a module when it is first used: compilers of kernels, which only GPUs need."""

import importlib.util
import sys
from types import ModuleType


def imported_when_used(name: str) -> ModuleType:
    """Return a module that is imported on the first access to one of its attributes."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
