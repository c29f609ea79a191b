"""The names of users' classes and functions in JSON."""

import sys
from pathlib import Path
from typing import Any

#: How the names of modules begin that are config files.
CONFIG_MODULE = "jaxpar_config_"


def name_of(cls: Any) -> str:
    """Return the name of a class or a function: `module:name`, or `file.py:name`."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file and cls.__module__.startswith((CONFIG_MODULE, "__main__")):
        return f"{Path(file).name}:{cls.__qualname__}"
    return f"{cls.__module__}:{cls.__qualname__}"
