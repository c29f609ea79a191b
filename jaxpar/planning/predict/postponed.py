"""Predicts the buffer of a zero-bubble schedule: factors of weight gradients that are put off."""

from jaxpar.config import Config
from jaxpar.planning.predict.attention import projections
from jaxpar.planning.predict.shard import Shard


def postponed_bytes(cfg: Config, shard: Shard) -> float:
    """Return the factors of postponed weight gradients: 2 (P - 1) microbatches in one chunk."""
    if not shard.execution.postpones_weight_gradients:
        return 0.0
    layers = 2 * (cfg.parallel.pipeline - 1) * shard.layers / shard.chunks
    return layers * shard.tokens * factors_per_token(cfg, shard)


def factors_per_token(cfg: Config, shard: Shard) -> float:
    """Return the bytes per token of the factors of a layer's weight gradients.

    They are the inputs of its matmuls, and the gradients of the outputs. The gradients of experts
    are not postponed.
    """
    m, t = cfg.model, cfg.parallel.tensor
    f = m.d_ff / t
    sites = [site for of in projections(m, t).values() for site in of]
    elements = sum(site.share * (site.inner + site.out) for site in sites)
    if not m.num_experts:
        apart = m.mlp_gate and not shard.execution.fused_gate_up
        elements += (3 if apart else 2) * m.d_model + (3 if m.mlp_gate else 2) * f
    return shard.width * elements
