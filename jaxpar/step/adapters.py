"""Adapters on a mesh: fresh ones added to loaded weights, and merged into them."""

from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.config import Config, LoraConfig, replace
from jaxpar.config.lora_targets import factor
from jaxpar.model import lora
from jaxpar.model.parameters import param_specs, trainable_specs
from jaxpar.sharding.params import join, partition_specs, split
from jaxpar.step.state import init_params


def base_config(cfg: Config) -> Config:
    """The config of the model without adapters, once they are merged."""
    return replace(cfg, lora=LoraConfig())


def add_fresh(params: Any, cfg: Config, mesh: Mesh) -> Any:
    """A model's parameters and, if the config has adapters, fresh ones.

    Args:     params: in running order, sharded as `state.state_shardings`.
    """
    if not cfg.lora.rank:
        return params
    return join(params, init_params(trainable_specs(cfg), cfg, mesh))


def merge(params: Any, cfg: Config, mesh: Mesh) -> Any:
    """The parameters, in place of the given ones, of the model without adapters that is the same.

    Args:     params: with adapters if the config has them, sharded as `state.state_shardings`.
    Returns:  as `state_shardings(without(cfg), mesh).params`.
    Communication: none: what a device holds of a matrix is the product of what it holds of the
              adapter's two.
    """
    if not cfg.lora.rank:
        return params
    whole, specs = partition_specs(param_specs(cfg.model)), param_specs(cfg.model, cfg.lora)
    local = jax.shard_map(
        lambda frozen, trainable: lora.merge(join(frozen, trainable), factor(cfg)),
        mesh=mesh,
        in_specs=(whole, partition_specs(trainable_specs(cfg))),
        out_specs=whole,
    )
    trainable, frozen = split(params, specs)
    return jax.jit(local, donate_argnums=0)(frozen, trainable)
