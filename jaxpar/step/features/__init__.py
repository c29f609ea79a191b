"""The features of train steps: each file of this folder with a `FEATURE`."""

import importlib
import pkgutil

from jaxpar.config import Config, value_of
from jaxpar.config.metrics import declare, declare_more
from jaxpar.config.schema.features import SECTIONS
from jaxpar.objectives.objective import objective_of
from jaxpar.objectives.tokens import MultiToken
from jaxpar.step.feature import Feature
from jaxpar.step.features.post_updates import OwnPostUpdate, post_updates_of

_modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
_by_name: list[Feature] = [m.FEATURE for m in _modules if hasattr(m, "FEATURE")]

#: In the order in which they act.
FEATURES: tuple[Feature, ...] = tuple(sorted(_by_name, key=lambda feature: feature.turn))

for _one in (*_by_name, *SECTIONS.values(), MultiToken):  # those of objectives come last
    declare(_one.metrics)


def features_of(cfg: Config) -> tuple[Feature, ...]:
    """Return the features that a config has, in order."""
    own = tuple(OwnPostUpdate(update) for update in post_updates_of(cfg))
    sections = [value for name in SECTIONS if isinstance(value := value_of(cfg, name), Feature)]
    ours = sorted((*sections, *FEATURES), key=lambda feature: feature.turn)
    return tuple(feature for feature in (*own, *ours) if feature.is_on(cfg))


def declare_own_metrics(cfg: Config) -> None:
    """Declare the metrics of users' values in a config."""
    if cfg.train.loss is not None:
        declare_more(objective_of(cfg).metrics)
    for feature in features_of(cfg):
        declare_more(feature.own_metrics(cfg))
