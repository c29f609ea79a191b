"""Predicts what a frozen model of an objective adds to a step: its weights, and a forward pass."""

import dataclasses
import functools

from jaxpar.config import Config
from jaxpar.config.schema.features import objective_in
from jaxpar.model.loss import num_chunks
from jaxpar.prediction.memory import MemoryForecast
from jaxpar.prediction.shard import shard_of, state_bytes


@functools.lru_cache(maxsize=4096)
def frozen_model_of(cfg: Config) -> Config | None:
    """Return the config with which a frozen model runs before each step; None without one.

    A forward pass recomputes nothing, so its remat policy is "none".

    Args:     cfg: resolved.
    """
    of = objective_in(cfg)
    if of is None or (found := of.frozen_model(cfg)) is None:
        return None
    return dataclasses.replace(found, parallel=dataclasses.replace(found.parallel, remat="none"))


def weights_of(frozen: Config) -> int:
    """Return the bytes of a model's weights on a device."""
    return state_bytes(frozen)[0]


def forward_pass(
    frozen: Config, weights: float, optimizer: float, layer: float, buffers: float
) -> MemoryForecast:
    """Predict the memory of a device during the model's forward pass.

    Weights in the compute dtype are as in a step; a layer's values, and a chunk of logits and their
    exponentials in float32, are all that is live besides.

    Args:     weights, optimizer: of both models. layer: bytes per token of a layer's
              values. buffers: of the step, with its batch.
    """
    shard, p, m = shard_of(frozen), frozen.parallel, frozen.model
    n = num_chunks(shard.tokens, shard.vocab, p.loss_chunks)
    gathered = float(shard.stack.everything)
    if p.zero == 3:
        gathered = shard.owned_of(shard.stack) + 2 * shard.gathered(shard.layer)
    return MemoryForecast(
        weights=weights,
        optimizer=optimizer,
        activations=shard.tokens * layer,
        logits=8.0 * shard.tokens / n * shard.vocab,
        gathered=shard.width * (gathered + shard.table),
        gradients=0.0,
        buffers=buffers + 2 * shard.tokens * shard.width * m.d_model / p.tensor,
        moment="frozen model",
    )
