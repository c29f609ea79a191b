"""Predicts how much of a run's state is on the device, where the rest of it is in host memory."""

from jaxpar.config import Config
from jaxpar.planning.predict.shard import Shard, moment_bytes, state_bytes


def before_update(cfg: Config, shard: Shard) -> tuple[float, float]:
    """Return the bytes of weights and of the rest of the state on the device until the update.

    Masters in host memory leave the weights of the step, in the compute dtype. They are the cast
    weights that the forecast counts as gathered. Only a loop over microbatches, whose every round
    gathers, keeps them apart.
    """
    weights, optimizer = state_bytes(cfg)
    if cfg.optimizer.offload:
        optimizer -= moment_bytes(cfg)
    if cfg.optimizer.offload_masters:
        loops = cfg.parallel.num_microbatches > 1 or cfg.parallel.pipeline > 1
        weights = weights * shard.width // 4 if loops else 0
    return weights, optimizer


def at_end(cfg: Config, shard: Shard) -> tuple[float, float]:
    """Return those at the end of the backward: of what is in host memory, also a layer's part."""
    weights, optimizer = state_bytes(cfg)
    layers = max(shard.layers, 1)
    if cfg.optimizer.offload:
        optimizer -= moment_bytes(cfg) * (layers - 1) // layers
    if cfg.optimizer.offload_masters:
        weights = weights * shard.width // 4 + weights // layers
    return weights, optimizer
