"""Predicts the buffer of a zero-bubble schedule: factors of weight gradients that are put off."""

from jaxpar.config import Config
from jaxpar.planning.predict.layer_kinds import LayerKind, layer_kinds
from jaxpar.planning.predict.shard import Shard


def postponed_bytes(cfg: Config, shard: Shard) -> float:
    """Return the factors of postponed weight gradients: 2 (P - 1) microbatches in one chunk."""
    if not shard.execution.postpones_weight_gradients:
        return 0.0
    layers = 2 * (cfg.parallel.pipeline - 1) * shard.layers / shard.chunks
    return layers * shard.tokens * factors_per_token(cfg, shard)


def factors_per_token(cfg: Config, shard: Shard) -> float:
    """Return the bytes per token of the factors of a layer's weight gradients. If layers differ,
    their mean.

    They are the inputs of its matmuls, and the gradients of the outputs. The gradients of layers
    with experts are those of the mixer: others are not postponed.
    """
    kinds = layer_kinds(cfg)
    return shard.width * sum(kind.share * _elements(kind, cfg, shard) for kind in kinds)


def _elements(kind: LayerKind, cfg: Config, shard: Shard) -> float:
    model, layer, elements = cfg.model, kind.layer, 0.0
    for component in (layer.mixer, None if kind.experts else layer.feed_forward):
        for of in component.matmuls(model, cfg.parallel.tensor).values() if component else ():
            elements += sum(site.times * site.share * (site.inner + site.out) for site in of)
    if layer.feed_forward and layer.feed_forward.fuses_gate_up and shard.execution.fused_gate_up:
        elements -= model.d_model  # one input of gate and up
    return elements
