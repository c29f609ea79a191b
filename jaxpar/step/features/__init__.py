"""The features of train steps: each file of this folder with a `FEATURE`."""

import importlib
import pkgutil

from jaxpar.config import Config
from jaxpar.config.metrics import declare, declare_more
from jaxpar.objectives.objective import declare_metrics, objective_of
from jaxpar.step.feature import Feature
from jaxpar.step.features.post_updates import OwnPostUpdate, post_updates_of

_modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
_by_name: list[Feature] = [m.FEATURE for m in _modules if hasattr(m, "FEATURE")]

#: In the order in which they act.
FEATURES: tuple[Feature, ...] = tuple(sorted(_by_name, key=lambda feature: feature.turn))

for _feature in _by_name:
    declare(_feature.metrics)
declare_metrics()  # again, so that the order is that whatever is imported first


def features_of(cfg: Config) -> tuple[Feature, ...]:
    """Return the features that a config has, in order."""
    own = tuple(OwnPostUpdate(update) for update in post_updates_of(cfg))
    return tuple(feature for feature in (*own, *FEATURES) if feature.is_on(cfg))


def declare_own_metrics(cfg: Config) -> None:
    """Declare the metrics of users' values in a config."""
    if cfg.train.loss is not None:
        declare_more(objective_of(cfg).metrics)
    for feature in features_of(cfg):
        declare_more(feature.own_metrics(cfg))
