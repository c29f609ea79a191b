"""Counts what one device stores and computes under a layout, from the parameter specs.

Letters as in docs/parallelism.md: N parameters, f their FSDP shards, t tensor, P pipeline,
c sequence.
"""

import functools
import itertools
import math
import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.components.model import STACK_OF_MODULES
from jaxpar.config import (
    ComputeConfig,
    Config,
    DilocoConfig,
    LoraConfig,
    Model,
    OptimizerConfig,
    ParallelConfig,
    replace,
)
from jaxpar.config.features import without_state
from jaxpar.config.layout.layer_split import layers_before_stages, layers_per_chunk
from jaxpar.config.layout.placement import expert_ways, spreads_experts
from jaxpar.execution.decisions import Execution, on_gpus, rows_per_device
from jaxpar.model.chunks import layers_of_chunk
from jaxpar.model.parameters import param_specs, specs_of
from jaxpar.optimizer.moments import map_moments
from jaxpar.sharding.axes import AXES, EXPERT, EXPERT_FSDP_AXES, FSDP_AXES, REPLICA, TENSOR
from jaxpar.sharding.params import ParamSpec, flat, is_spec
from jaxpar.step.layer_order import num_slots, with_slots
from jaxpar.step.state import abstract_state, feedback_of, state_specs


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
    model = _with_slots(cfg)
    weights, rest = _bytes_on_device(model, cfg.compute, cfg.lora, cfg.optimizer, cfg.diloco, sizes)
    return weights, rest + feedback_bytes(cfg)


def _with_slots(cfg: Config) -> Model:
    """Return the model with a layer for each slot."""
    m, before = cfg.model, layers_before_stages(cfg.model, cfg.parallel)
    chunks = cfg.parallel.pipeline * cfg.parallel.virtual_stages
    return m.with_layers([*m.layers[:before], *layers_of_chunk(cfg) * chunks])


def feedback_bytes(cfg: Config) -> int:
    """Return the bytes on one device of what compressed sums over replicas keep."""
    specs = flat(feedback_of(cfg, with_slots(specs_of(cfg), cfg)) or {}).values()
    return sum(4 * math.prod(s.shape) // ways(cfg, _named(s.partition_spec)) for s in specs)


@functools.cache
def _bytes_on_device(
    model: Model,
    compute: ComputeConfig,
    lora: LoraConfig | None,
    optimizer: OptimizerConfig,
    diloco: DilocoConfig | None,
    sizes: tuple[int, ...],
) -> tuple[int, int]:
    ways_of = dict(zip(AXES, sizes, strict=True))

    def on_device(leaves: tuple[Leaf, ...]) -> int:
        cut = lambda leaf: math.prod(ways_of[axis] for axis in leaf.axes)  # noqa: E731
        return sum(leaf.size * leaf.itemsize // cut(leaf) for leaf in leaves)

    replicas = ways_of[REPLICA] if diloco else 1
    weights, rest = _state_leaves(model, compute, lora, optimizer, diloco, replicas)
    return on_device(weights), on_device(rest)


@functools.cache
def _state_leaves(
    model: Model,
    compute: ComputeConfig,
    lora: LoraConfig | None,
    optimizer: OptimizerConfig,
    diloco: DilocoConfig | None,
    replicas: int,
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    parallel = ParallelConfig(replica=replicas)
    cfg = Config(
        model=model,
        compute=compute,
        lora=lora,
        optimizer=optimizer,
        diloco=diloco,
        parallel=parallel,
    )
    state, specs = abstract_state(cfg), state_specs(cfg)

    def leaves(arrays: Any, partitions: Any) -> tuple[Leaf, ...]:
        is_leaf = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
        pairs = zip(
            jax.tree.leaves(arrays), jax.tree.leaves(partitions, is_leaf=is_leaf), strict=True
        )
        return tuple(Leaf(math.prod(a.shape), a.dtype.itemsize, _named(p)) for a, p in pairs)

    return leaves(state.params, specs.params), leaves(
        (state.step, state.opt_state, state.extra),
        (specs.step, specs.opt_state, specs.extra),
    )


def _named(spec: Any) -> tuple[str, ...]:
    entries = [entry for entry in spec if entry is not None]
    return tuple(a for e in entries for a in ((e,) if isinstance(e, str) else e))


def moment_bytes(cfg: Config) -> int:
    """Return the bytes of one device's moments, which `optimizer.offload` moves to the host."""
    counts: list[int] = []
    state = abstract_state(cfg)
    map_moments(lambda _, __, leaf: counts.append(1), state.params, state.opt_state)
    alone = replace(without_state(cfg), **{"parallel.replica_reduction": "float32"})
    return state_bytes(alone)[1] if counts else 0


#: Load of the fullest rank of an expert axis, relative to the mean: the default of a prediction.
#: Every layer waits for it. 1.17 was measured with a fresh router on two ranks, 1 is balanced.
EXPERT_IMBALANCE = 1.1


@dataclass(frozen=True)
class Parameters:
    """Parameters on one device, sharded over tensor and expert, but not over FSDP.

    everything   all of them.
    matrices     those that FSDP shards.
    experts      those of them that are matrices of experts, which FSDP shards over data and
                 sequence only.
    """

    everything: int
    matrices: int
    experts: int

    def times(self, n: int) -> "Parameters":
        """Return n times as many."""
        return Parameters(*(n * value for value in vars(self).values()))

    def __add__(self, other: "Parameters") -> "Parameters":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Parameters(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class Shard:
    """Sizes of one device's work on one microbatch.

    rows, tokens        rows and tokens of a microbatch on a device (its shard of the sequence).
    layers, chunks      layers of the device for which it has memory, over all its chunks. Every
                        stage has the modules of multi-token prediction, which count as layers.
    layers_in_turn      layers for which it has time in a round of the pipeline: those of the
                        slowest stage, chunk by chunk, since stages are in lock-step.
    dense_in_turn       those of them that are dense layers before the stages of a pipeline. They
                        save nothing for the backward, which computes them again.
    layer, stack        parameters of one layer, and of all layers of the device. If layers
                        differ, `layer` is one of the largest.
    table               parameters of the embedding table (the head has the same number), sharded
                        over tensor and pipeline.
    fsdp, expert_fsdp   number of FSDP shards, and of those of the experts' matrices.
    width               bytes of an element in the compute dtype.
    execution           how the config is executed on GPUs.
    trainable           whether training updates the parameters. With adapters (`lora`) they
                        are frozen, without gradients or moments. Adapters are too small to count.
    imbalance           load of the fullest rank of the expert axis, relative to the mean.
    """

    rows: int
    tokens: int
    layers: int
    layers_in_turn: int
    dense_in_turn: int
    chunks: int
    layer: Parameters
    stack: Parameters
    table: int
    vocab: int
    fsdp: int
    expert_fsdp: int
    width: int
    execution: Execution
    trainable: bool = True
    imbalance: float = EXPERT_IMBALANCE

    @property
    def parameters(self) -> int:
        """Parameters of the device's layers, table and head, before FSDP sharding."""
        return self.stack.everything + 2 * self.table

    @property
    def owned(self) -> float:
        """The same, after FSDP sharding."""
        return self.owned_of(self.stack) + 2 * self.table / self.fsdp

    def owned_of(self, layers: Parameters) -> float:
        """Return the parameters of layers after FSDP sharding."""
        experts = layers.experts / self.expert_fsdp
        return (layers.everything - layers.experts) / self.fsdp + experts

    def gathered(self, layers: Parameters) -> int:
        """Return the parameters of matrices that FSDP gathers."""
        return layers.matrices - (layers.experts if self.expert_fsdp == 1 else 0)


def shard_of(cfg: Config, imbalance: float = EXPERT_IMBALANCE) -> Shard:
    """Return the sizes of one device's work.

    Args:     cfg: resolved. imbalance: of the expert axis.
    """
    m, p = cfg.model, cfg.parallel
    rows = rows_per_device(cfg)
    layers = num_slots(cfg) // p.pipeline
    ways_of_layers = p.tensor, p.expert, spreads_experts(p)
    before = layers_before_stages(m, p)
    here = Counter(layer.name for layer in layers_of_chunk(cfg) * p.virtual_stages)
    here.update(layer.name for layer in m.layers[:before])
    of_stacks = {name: _of_a_layer(m, name, *ways_of_layers) for name in here}
    stack = functools.reduce(operator.add, (of_stacks[name].times(n) for name, n in here.items()))
    module = _of_a_layer(m, STACK_OF_MODULES, *ways_of_layers)
    vocab = m.vocab_size // (p.tensor * p.pipeline)
    execution = on_gpus(cfg)
    in_turn, dense_in_turn = _layers_in_turn(cfg, execution)
    return Shard(
        rows=rows,
        tokens=rows * cfg.data.seq_len // p.sequence,
        layers=layers + m.mtp_depth,
        layers_in_turn=in_turn + m.mtp_depth,
        dense_in_turn=dense_in_turn,
        chunks=p.virtual_stages,
        layer=max(of_stacks.values(), key=lambda one: one.everything),
        stack=stack + module.times(m.mtp_depth),
        table=vocab * m.d_model,
        vocab=vocab,
        fsdp=ways(cfg, FSDP_AXES),
        expert_fsdp=ways(cfg, EXPERT_FSDP_AXES),
        width=jnp.dtype(cfg.compute.dtype).itemsize,
        execution=execution,
        trainable=cfg.lora is None,
        imbalance=imbalance if expert_ways(p) > 1 else 1.0,
    )


def _layers_in_turn(cfg: Config, execution: Execution) -> tuple[int, int]:
    """Layers in turn, and how many of them are dense layers before the stages.

    Empty slots are skipped by a branch, or computed and masked. So are dense layers on all stages
    but the first.
    """
    stages, sizes = cfg.parallel.pipeline, layers_per_chunk(cfg)
    before = layers_before_stages(cfg.model, cfg.parallel)
    if execution.stage_wide_collectives or cfg.parallel.layer_loop == "scan":
        return num_slots(cfg) // stages + before, before
    (first, *others), *rounds = itertools.batched(sizes, stages)
    later = sum(map(max, rounds))
    slowest = max((first + before, *others))
    waits = before > 0 and slowest > first + before  # the first stage
    return slowest + later, 0 if waits else before


@functools.cache
def _of_a_layer(model: Model, name: str, tensor: int, expert: int, spread: bool) -> Parameters:
    """Parameters of one layer of a stack, or of one module, on one device."""
    everything, matrices, experts = 0, 0, 0
    specs = param_specs(model, spread=spread).get(name, {})
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        of_experts = {"experts", "spread_experts"} & set(spec.axes)
        size = _size(spec, {TENSOR: tensor, EXPERT: expert if of_experts else 1})
        everything += size
        matrices += size if {"embed", "expert_embed", "latent"} & set(spec.axes) else 0
        experts += size if "expert_embed" in spec.axes else 0
    return Parameters(everything, matrices, experts)


def _size(spec: ParamSpec, sizes: dict[str, int]) -> int:
    """Elements of one layer's array on a device, which some axes shard."""
    size, axes = math.prod(spec.shape[1:]), _named(spec.partition_spec)
    return size // math.prod(n for axis, n in sizes.items() if axis in axes)


# ------ Predicts how much of a run's state is on the device, where the rest of it is in host memory


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
