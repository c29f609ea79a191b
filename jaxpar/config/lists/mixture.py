"""The sources of the training data and their weights."""

from jaxpar.config import Config
from jaxpar.config.schema.items import MixtureWeights, Source


def sources_of(cfg: Config) -> tuple[Source, ...]:
    """Return the sources to train on: those of `data.mixture`, or only `data.path`."""
    return cfg.data.mixture or (Source(cfg.data.path, 1.0),)


def stages(cfg: Config) -> tuple[MixtureWeights, ...]:
    """Return the weights of the run's stages: those of the sources, then of the schedule."""
    first = MixtureWeights(0, tuple(source.weight for source in sources_of(cfg)))
    return first, *cfg.data.mixture_schedule
