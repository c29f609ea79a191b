"""Mesh axes, logical axes by `components/weight.py`, and shape letters. Read `params.py` next.

Names in other systems: PIPELINE = PP, REPLICA = DDP or the outer axis of HSDP, DATA = FSDP/ZeRO,
EXPERT = EP, SEQUENCE = CP (context parallelism), TENSOR = TP with sequence parallelism.

Shape letters, used as suffixes where arrays of two ranks meet (`q_BTHK`):
    B batch   T query positions   S key positions   D model width   H query heads   G KV heads
    K head dim   F feed-forward   V vocabulary   L layers   E experts   P pipeline stages
    M microbatches   R rank of an adapter   I head dim of values, if it is not K
"""

from jax.sharding import PartitionSpec

from jaxpar.components.weight import RULES

PIPELINE = "pipeline"
REPLICA = "replica"
DATA = "data"
EXPERT = "expert"
SEQUENCE = "sequence"
TENSOR = "tensor"

#: Mesh axes, outermost (slowest link) first.
AXES = (PIPELINE, REPLICA, DATA, EXPERT, SEQUENCE, TENSOR)

#: Axes over which the rows of a batch are split.
BATCH_AXES = (REPLICA, DATA, EXPERT)

#: Axes over which tokens are split. The loss is summed over these.
TOKEN_AXES = (*BATCH_AXES, SEQUENCE)

#: Axes over which parameters, gradients and moments are sharded (ZeRO).
FSDP_AXES = RULES["embed"]

#: The same for the matrices of experts, whose experts are split over EXPERT.
EXPERT_FSDP_AXES = RULES["expert_embed"]

#: Axes over which experts are split, if those of an expert rank are spread over its tensor ranks.
SPREAD_EXPERT_AXES = RULES["spread_experts"]

#: Axes over which the vocabulary is split. They include the pipeline, so that all stages share the
#: work of the head.
VOCAB_AXES = RULES["vocab"]

#: Logical axes that count layers, modules and experts, each with matrices of its own.
COUNTS = ("layer", "depth", "experts", "spread_experts", "every_expert")

#: Sharding of every [B, T] array of a batch.
BATCH_SPEC = PartitionSpec(BATCH_AXES, SEQUENCE)


def partition_spec(logical_axes: tuple[str, ...]) -> PartitionSpec:
    """Return the PartitionSpec of an array, from the logical axis of each of its dimensions.

    Args:     logical_axes: one name from `RULES` per dimension.
    Returns:  a PartitionSpec with one entry per dimension.
    Raises:   KeyError for a name that is not in `RULES`.
    """
    return PartitionSpec(*(RULES[name] or None for name in logical_axes))


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """Return all mesh axes in a PartitionSpec."""
    named: set[str] = set()
    for entry in spec:
        named.update(() if entry is None else (entry,) if isinstance(entry, str) else entry)
    return frozenset(named)
