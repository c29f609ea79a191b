"""Check for optional packages."""

import importlib.util
from typing import Any

from jaxpar.config.errors import ConfigError


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
