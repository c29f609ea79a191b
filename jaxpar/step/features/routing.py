"""Recorded routing: the experts that routers chose in a step, to be read or repeated.

    record   a probe: the experts of this device's tokens
    repeat   a feed: the experts that this device's tokens shall have. The router still computes its
             own choice, the weights of the experts and the losses, so that a step does the same
             work, and its gradients are those of training.

In a batch or a file:   unsigned [b, T, layers with experts, k], layers in the model's order.
In a layer:             float32 [b, T/sequence, k], for all b rows of the device, of which a
microbatch, or a row group, has some. If experts are spread over TENSOR, each of its ranks routes
some of the tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.components.experts import Experts, experts_in, num_experts, stacks_of_experts
from jaxpar.config import Config
from jaxpar.config.lists.recorded_steps import id_bits
from jaxpar.model.chunks import layers_of_chunk, scan_period
from jaxpar.model.probes import Feed, LayerProbe, Seen
from jaxpar.parallel.collectives import psum, varying
from jaxpar.sharding.axes import PIPELINE, TENSOR
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.params import join
from jaxpar.step.feature import Feature
from jaxpar.step.layer_order import EMPTY, expert_layers_here
from jaxpar.step.progress import TrainStep

#: The name of the record among a step's results.
ROUTING = "routing"


def _chosen(s: Seen) -> jax.Array:
    """The experts of a microbatch's tokens, float32 [B, T/sequence, k]."""
    experts = s.more["routing"].experts
    B, T, k = experts.shape
    whole, rank = s.w[RECORD.key].shape[1], lax.axis_index(TENSOR)
    chosen = experts.astype(jnp.float32)
    if whole == T:
        return (rank == 0) * chosen  # all its ranks have the same tokens
    empty = varying(jnp.zeros((B, whole, k), jnp.float32))
    return lax.dynamic_update_slice_in_dim(empty, chosen, rank * T, axis=1)


def _shape(batch: Batch, cfg: Config) -> tuple[int, ...]:
    return (*batch.tokens.shape, experts_in(cfg.model)[0].experts_per_token)


def _repeated(chosen: jax.Array, fed: jax.Array, context: Any) -> jax.Array:
    """Return the experts to use. The choice by value keeps the router's own one in the program."""
    experts = fed[context.rows].astype(chosen.dtype)
    if (T := chosen.shape[1]) < experts.shape[1]:
        experts = lax.dynamic_slice_in_dim(experts, lax.axis_index(TENSOR) * T, T, axis=1)
    return jnp.where(experts >= 0, experts, chosen)


RECORD = LayerProbe("routing_record", "routing", _chosen, _shape, by_row=True)
REPEAT = Feed("routing_to_repeat", "choice", _repeated)


class RoutingRecord(Feature):
    """Records the experts of each token if requested to, and repeats those of `Batch.experts`."""

    name = "recorded_routing"
    turn = 50
    handles_skips = True

    def is_on(self, cfg: Config) -> bool:
        return bool(experts_in(cfg.model))

    def probes(self, cfg: Config, requested: tuple[str, ...]) -> tuple[LayerProbe, ...]:
        return (RECORD,) if ROUTING in requested and cfg.lora is None else ()

    def feeds(self, cfg: Config, batch: Batch) -> tuple[Feed, ...]:
        return (REPEAT,) if batch.experts is not None else ()

    def before_gradients(self, s: TrainStep) -> TrainStep:
        if s.batch.experts is None:
            return s
        fed = join(s.fed, _to_repeat(s.batch.experts, s.cfg))
        return s.replace(fed=fed, batch=dataclasses.replace(s.batch, experts=None))

    @jax.named_scope("record_routing")
    def after_update(self, s: TrainStep) -> TrainStep:
        """Communication: an all-reduce over PIPELINE and TENSOR."""
        if RECORD.name not in s.probes:
            return s
        m, here = s.cfg.model, s.probes[RECORD.name].stage
        assert here is not None
        layers, count = expert_layers_here(s.cfg), len(stacks_of_experts(m))
        at = jnp.where(layers == EMPTY, count, layers)
        every = jnp.zeros((count, *here.shape[1:]), jnp.float32).at[at].set(here, mode="drop")
        whole = jnp.moveaxis(psum(every, (PIPELINE, TENSOR)), 0, 2)
        whole = whole.astype(f"uint{id_bits(num_experts(m))}")
        return s.replace(records=s.records | {ROUTING: whole})


def _to_repeat(experts: jax.Array, cfg: Config) -> Any:
    """Return `REPEAT` of each layer here, as a tree like that of `fused_weights.fuse`."""
    p = cfg.parallel
    layers = jnp.maximum(expert_layers_here(cfg), 0)
    here = varying(jnp.moveaxis(experts, 2, 0)[layers].astype(jnp.float32))
    chunks: list[Any] = []
    for of_chunk in jnp.split(here, p.virtual_stages):
        has_experts = [isinstance(one.feed_forward, Experts) for one in layers_of_chunk(cfg)]
        if p.layer_loop == "scan" and (n := scan_period(layers_of_chunk(cfg))) > 1:
            by_period = of_chunk.reshape(-1, sum(has_experts[:n]), *of_chunk.shape[1:])
            of_each = iter(jnp.moveaxis(by_period, 1, 0))
            in_order: Any = [{REPEAT.key: next(of_each)} if has else {} for has in has_experts[:n]]
        elif p.layer_loop == "scan":
            in_order = {REPEAT.key: of_chunk}
        else:
            of_each = iter(of_chunk)
            in_order = tuple({REPEAT.key: next(of_each)} if has else {} for has in has_experts)
        chunks.append(in_order)
    return {"top": {}, "layers": tuple(chunks)}


FEATURE = RoutingRecord()
