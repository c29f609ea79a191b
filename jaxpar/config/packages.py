"""Optional packages: what to install when one is missing."""

import importlib.util
from typing import Any

from jaxpar.config.errors import ConfigError


def require_package(name: str, field: str, value: Any, otherwise: str = "") -> None:
    """Check that an optional package is installed.

    The fix names the package itself, not an extra of jaxpar: that works from a checkout and from a
    wheel alike.

    Args:     name: as pip knows it; its module has underscores for dashes. field, value: what needs
              it. otherwise: what to do without it.
    Raises:   ConfigError when it is not installed.
    """
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        fix = f"run pip install {name}" + (f", or {otherwise}" if otherwise else "")
        raise ConfigError(field, value, f"needs {name}, which is not installed", fix)
