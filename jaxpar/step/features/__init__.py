"""The features of train steps, in the order in which they act."""

from jaxpar.config import Config
from jaxpar.config.metrics import declare, declare_more
from jaxpar.objectives.objective import objective_of
from jaxpar.step.feature import Feature
from jaxpar.step.features.compression import Compression
from jaxpar.step.features.diloco import Diloco
from jaxpar.step.features.experts import ExpertBalance
from jaxpar.step.features.guard import Guard
from jaxpar.step.features.layer_metrics import LayerMetrics
from jaxpar.step.features.moving_average import MovingAverage
from jaxpar.step.features.own_probes import OwnProbes
from jaxpar.step.features.post_updates import OwnPostUpdate, post_updates_of
from jaxpar.step.features.qk_clip import QkClip
from jaxpar.step.features.routing import RoutingRecord

#: Those that change weights come before the average of weights; the guard counts at the end.
FEATURES: tuple[Feature, ...] = (
    QkClip(),
    MovingAverage(),
    Compression(),
    ExpertBalance(),
    RoutingRecord(),
    LayerMetrics(),
    OwnProbes(),
    Guard(),
    Diloco(),
)

for _feature in (FEATURES[3], FEATURES[0], FEATURES[5]):  # in the order in which steps return them
    declare(_feature.metrics)


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
