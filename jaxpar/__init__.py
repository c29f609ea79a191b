"""jaxpar: pure-functional pre-training of language models in JAX, sharded over one named mesh.

The Python API is `jaxpar.api`, whose names are also here, and `jaxpar.functional`:
docs/python_api.md. `import jaxpar` imports nothing else. A name is imported when it is first used,
and JAX starts its devices when a `Trainer` is made, or a model loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.api.loading import generate, load_config, load_model, read_metrics
    from jaxpar.api.trainer import Trainer
    from jaxpar.config import Config, ConfigError, replace
    from jaxpar.inference.options import Sampling
    from jaxpar.objectives.losses import Loss, Scores
    from jaxpar.sharding.params import ParamSpec
    from jaxpar.step.features.own_probes import Probe
    from jaxpar.step.features.post_updates import PostUpdate
    from jaxpar.training.callbacks.callback import Callback, Progress, Request

__version__ = "0.1.0"

#: The module of each name of the API.
_MODULES = {
    "Callback": "jaxpar.training.callbacks.callback",
    "Config": "jaxpar.config",
    "ConfigError": "jaxpar.config",
    "Loss": "jaxpar.objectives.losses",
    "ParamSpec": "jaxpar.sharding.params",
    "PostUpdate": "jaxpar.step.features.post_updates",
    "Probe": "jaxpar.step.features.own_probes",
    "Progress": "jaxpar.training.callbacks.callback",
    "Request": "jaxpar.training.callbacks.callback",
    "Sampling": "jaxpar.inference.options",
    "Scores": "jaxpar.objectives.losses",
    "Trainer": "jaxpar.api.trainer",
    "generate": "jaxpar.api.loading",
    "load_config": "jaxpar.api.loading",
    "load_model": "jaxpar.api.loading",
    "read_metrics": "jaxpar.api.loading",
    "replace": "jaxpar.config",
}

__all__ = [
    "Callback",
    "Config",
    "ConfigError",
    "Loss",
    "ParamSpec",
    "PostUpdate",
    "Probe",
    "Progress",
    "Request",
    "Sampling",
    "Scores",
    "Trainer",
    "generate",
    "load_config",
    "load_model",
    "read_metrics",
    "replace",
]


def __getattr__(name: str) -> Any:
    if name == "functional":  # a package, and no name of another
        return importlib.import_module("jaxpar.functional")
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "functional"})
