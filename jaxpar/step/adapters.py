"""LoRA adapters on a mesh: add new adapters to loaded weights, and merge adapters into them."""

from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.config import Config, replace
from jaxpar.config.lists.lora_targets import factor
from jaxpar.model import lora
from jaxpar.model.parameters import specs_of, trainable_specs
from jaxpar.sharding.params import join, partition_specs, split
from jaxpar.step.state import init_params


def base_config(cfg: Config) -> Config:
    """Return the config of the model after its adapters are merged."""
    return replace(cfg, lora=None)


def add_fresh(params: Any, cfg: Config, mesh: Mesh) -> Any:
    """Return a model's parameters with newly initialized adapters, if the config has adapters.

    Args:     params: in running order, sharded as `state.state_shardings`.
    """
    if not cfg.lora:
        return params
    return join(params, init_params(trainable_specs(cfg), cfg, mesh))


def merge(params: Any, cfg: Config, mesh: Mesh) -> Any:
    """Merge adapters into the weights: an equivalent model without adapters.

    Args:     params: with adapters if the config has them, sharded as `state.state_shardings`.
              Their memory is donated.
    Returns:  parameters sharded as `state_shardings(base_config(cfg), mesh).params`.
    Communication: none. A device's shard of a matrix is updated by the product of its shards of the
              adapter's two matrices.
    """
    if not cfg.lora:
        return params
    scale = factor(cfg.lora)
    whole, specs = partition_specs(specs_of(cfg, adapters=False)), specs_of(cfg)
    local = jax.shard_map(
        lambda frozen, trainable: lora.merge(join(frozen, trainable), scale),
        mesh=mesh,
        in_specs=(whole, partition_specs(trainable_specs(cfg))),
        out_specs=whole,
    )
    trainable, frozen = split(params, specs)
    return jax.jit(local, donate_argnums=0)(frozen, trainable)
