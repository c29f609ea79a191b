"""Counts what one device stores and computes under a layout, from the parameter specs.

Letters as in docs/parallelism.md: N parameters, f their FSDP shards, t tensor, P pipeline,
c sequence.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config, LoraConfig, ModelConfig, OptimizerConfig, replace
from jaxpar.config.layout.layer_split import layers_per_chunk
from jaxpar.execution.decisions import Execution, on_gpus, rows_per_device
from jaxpar.model.parameters import param_specs
from jaxpar.optimizer.moments import map_moments
from jaxpar.sharding.axes import AXES, FSDP_AXES, TENSOR
from jaxpar.sharding.params import ParamSpec, is_spec
from jaxpar.step.layer_order import num_slots
from jaxpar.step.state import abstract_state, state_specs


@dataclass(frozen=True)
class Leaf:
    """An array of the state: its elements, bytes per element and the mesh axes that shard it."""

    size: int
    itemsize: int
    axes: tuple[str, ...]


def ways(cfg: Config, axes: tuple[str, ...]) -> int:
    """Return the product of the sizes of mesh axes."""
    return math.prod(getattr(cfg.parallel, axis) for axis in axes)


def state_bytes(cfg: Config) -> tuple[int, int]:
    """Return the bytes on one device of the master weights, and of the rest of the state.

    They are exact. With `optimizer.offload`, they include the moments in host memory.
    """
    sizes = tuple(getattr(cfg.parallel, axis) for axis in AXES)
    model = replace(cfg, **{"model.num_layers": num_slots(cfg)}).model
    return _bytes_on_device(model, cfg.lora, cfg.optimizer, sizes)


@functools.cache
def _bytes_on_device(
    model: ModelConfig, lora: LoraConfig, optimizer: OptimizerConfig, sizes: tuple[int, ...]
) -> tuple[int, int]:
    ways_of = dict(zip(AXES, sizes, strict=True))

    def on_device(leaves: tuple[Leaf, ...]) -> int:
        cut = lambda leaf: math.prod(ways_of[axis] for axis in leaf.axes)  # noqa: E731
        return sum(leaf.size * leaf.itemsize // cut(leaf) for leaf in leaves)

    weights, rest = _state_leaves(model, lora, optimizer)
    return on_device(weights), on_device(rest)


@functools.cache
def _state_leaves(
    model: ModelConfig, lora: LoraConfig, optimizer: OptimizerConfig
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    cfg = Config(model=model, lora=lora, optimizer=optimizer)
    state, specs = abstract_state(cfg), state_specs(cfg)

    def leaves(arrays: Any, partitions: Any) -> tuple[Leaf, ...]:
        is_leaf = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
        pairs = zip(
            jax.tree.leaves(arrays), jax.tree.leaves(partitions, is_leaf=is_leaf), strict=True
        )
        return tuple(Leaf(math.prod(a.shape), a.dtype.itemsize, _named(p)) for a, p in pairs)

    return leaves(state.params, specs.params), leaves(
        (state.step, state.opt_state, state.guard), (specs.step, specs.opt_state, specs.guard)
    )


def _named(spec: Any) -> tuple[str, ...]:
    entries = [entry for entry in spec if entry is not None]
    return tuple(a for e in entries for a in ((e,) if isinstance(e, str) else e))


def moment_bytes(cfg: Config) -> int:
    """Return the bytes of one device's moments, which `optimizer.offload` moves to the host."""
    counts: list[int] = []
    map_moments(lambda _, __, leaf: counts.append(1), abstract_state(cfg).opt_state)
    return state_bytes(cfg)[1] if counts else 0


@dataclass(frozen=True)
class Shard:
    """Sizes of one device's work on one microbatch.

    rows, tokens        rows and tokens of a microbatch on a device (its shard of the sequence).
    layers, chunks      layers of the device for which it has memory, over all its chunks.
    layers_in_turn      layers for which it has time in a round of the pipeline: those of the
                        slowest stage, chunk by chunk, since stages are in lock-step.
    layer, matrices     parameters of a layer, sharded over tensor but not over FSDP: all, and those
                        that FSDP shards.
    table               parameters of the embedding table (the head has the same number), sharded
                        over tensor and pipeline.
    fsdp                number of FSDP shards.
    width               bytes of an element in the compute dtype.
    execution           how the config is executed on GPUs.
    trainable           whether training updates the parameters. With adapters (`lora.rank`) they
                        are frozen, without gradients or moments. Adapters are too small to count.
    """

    rows: int
    tokens: int
    layers: int
    layers_in_turn: int
    chunks: int
    layer: int
    matrices: int
    table: int
    vocab: int
    fsdp: int
    width: int
    execution: Execution
    trainable: bool = True

    @property
    def parameters(self) -> int:
        """Parameters of the device's layers, table and head, before FSDP sharding."""
        return self.layers * self.layer + 2 * self.table


def shard_of(cfg: Config) -> Shard:
    """Return the sizes of one device's work.

    Args:     cfg: resolved.
    """
    m, p = cfg.model, cfg.parallel
    rows = rows_per_device(cfg)
    layer, matrices = _of_a_layer(m, p.tensor)
    vocab = m.vocab_size // (p.tensor * p.pipeline)
    execution = on_gpus(cfg)
    return Shard(
        rows=rows,
        tokens=rows * cfg.data.seq_len // p.sequence,
        layers=num_slots(cfg) // p.pipeline,
        layers_in_turn=_layers_in_turn(cfg, execution),
        chunks=p.virtual_stages,
        layer=layer,
        matrices=matrices,
        table=vocab * m.d_model,
        vocab=vocab,
        fsdp=ways(cfg, FSDP_AXES),
        width=jnp.dtype(m.dtype).itemsize,
        execution=execution,
        trainable=cfg.lora.rank == 0,
    )


def _layers_in_turn(cfg: Config, execution: Execution) -> int:
    """Empty slots are skipped by a branch, or computed and masked."""
    stages, sizes = cfg.parallel.pipeline, layers_per_chunk(cfg)
    if execution.stage_wide_collectives or cfg.parallel.layer_loop == "scan":
        return num_slots(cfg) // stages
    return sum(map(max, itertools.batched(sizes, stages)))


@functools.cache
def _of_a_layer(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Parameters of one layer on one tensor rank: all, and those of its matrices."""
    everything, matrices = 0, 0
    for spec in jax.tree.leaves(param_specs(model)["layers"], is_leaf=is_spec):
        size = _size(spec, tensor)
        everything += size
        matrices += size if {"embed", "expert_embed"} & set(spec.axes) else 0
    return everything, matrices


def _size(spec: ParamSpec, tensor: int) -> int:
    """Elements of one layer's array on one tensor rank."""
    size = math.prod(spec.shape[1:])
    return size // tensor if TENSOR in _named(spec.partition_spec) else size
