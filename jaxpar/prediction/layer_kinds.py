"""Lists the kinds of a model's layers: what they are composed of, and their remat policy."""

import functools
from collections import Counter
from dataclasses import dataclass

from jaxpar.components.costs import NO_WIDTHS, Widths
from jaxpar.components.experts import Experts
from jaxpar.components.model import Layer
from jaxpar.config import Config
from jaxpar.config.layout.layer_split import slots_per_chunk
from jaxpar.config.remat_policies import of_layers
from jaxpar.config.schema.items import Remat
from jaxpar.model.chunks import layers_of_chunk


@dataclass(frozen=True)
class LayerKind:
    """Some layers of a model.

    layer   each of them.
    remat   their policy.
    share   their share of the layers.
    """

    layer: Layer
    remat: Remat
    share: float

    @property
    def experts(self) -> Experts | None:
        """Their experts, if they have some."""
        found = self.layer.feed_forward
        return found if isinstance(found, Experts) else None


# A prediction reads them many times.
@functools.lru_cache(maxsize=64)
def layer_kinds(cfg: Config) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of the stages.

    Those before the stages of a pipeline are of `before_stages`.
    """
    policies = of_layers(cfg.parallel, slots_per_chunk(cfg))
    here = list(zip(layers_of_chunk(cfg), policies, strict=False))  # chunks have the same kinds
    counts = Counter(here)
    return tuple(LayerKind(*kind, count / len(here)) for kind, count in counts.items())


def before_stages(cfg: Config) -> LayerKind:
    """Return the kind of the dense layers before the stages, whose backward computes them again."""
    return LayerKind(cfg.model.layers[0], "full", 1.0)


def widths(layer: Layer, cfg: Config, tensor: int) -> Widths:
    """Return the values per token and tensor rank of a layer's mixer."""
    return layer.mixer.widths(cfg.model, tensor) if layer.mixer else NO_WIDTHS


def hidden(layer: Layer, cfg: Config, tensor: int) -> tuple[float, float]:
    """Return `FeedForward.hidden` of a layer: of all tokens, so not of experts."""
    found = layer.feed_forward
    return found.hidden(cfg.model, tensor) if found else (0.0, 0.0)
