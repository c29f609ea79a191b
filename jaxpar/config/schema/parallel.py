"""The sections of the mesh, of DiLoCo and of the processes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Count, Fraction, Natural, Positive, Range
from jaxpar.config.rules.limits import MAX_AXIS, MAX_SECONDS, MAX_SEQUENCE
from jaxpar.config.schema.items import Remat, RematSlice

#: The fields that a layout sets, in display order, and the word for all that have their defaults.
LayoutField = Literal[
    "all",
    "pipeline",
    "replica",
    "data",
    "expert",
    "sequence",
    "tensor",
    "zero",
    "num_microbatches",
    "virtual_stages",
    "row_groups",
    "remat",
]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The device mesh, and how model and batch are split over it."""

    auto: tuple[LayoutField, ...] = ()
    """Layout fields for the planner to choose, or all."""
    pipeline: Annotated[int, Range(1, MAX_AXIS)] = 1
    """Pipeline-parallel stages (PP)."""
    replica: Annotated[int, Range(1, MAX_AXIS)] = 1
    """Replicas of the sharded model (DDP; the outer axis of HSDP)."""
    data: Annotated[int, Range(-1, MAX_AXIS)] = -1
    """Shards of the batch and the parameters (FSDP). -1: all remaining devices."""
    expert: Annotated[int, Range(1, MAX_AXIS)] = 1
    """Shards of the experts (EP): each device has some experts, and receives the tokens of all
    devices of the axis. Everything else treats it as a larger `data`."""
    expert_tensor: int = 0
    """Tensor ranks over which each expert is split (Megatron's expert tensor parallel size). 0: all
    of them. 1: none; experts are whole, and spread over the tensor ranks of an expert rank too."""
    expert_dispatch: Literal["auto", "tokens", "rows"] = "auto"
    """What devices of an expert axis send. tokens: each token to all of them. rows: a row for each
    expert of a token, to the device of that expert. auto: whichever sends fewer bytes."""
    expert_slack: Positive = 1.25
    """Rows of the experts' buffer on an expert axis, as a multiple of a device's equal share. Rows
    that do not fit are computed in further rounds: a larger one needs memory, a smaller one time.
    No row is dropped. With dispatch by rows, also the rows that two devices exchange in a round."""
    sequence: Annotated[int, Range(1, MAX_AXIS)] = 1
    """Shards of each sequence (context parallelism)."""
    tensor: Annotated[int, Range(1, MAX_AXIS)] = 1
    """Tensor- and sequence-parallel ranks."""
    num_microbatches: Annotated[int, Range(1, MAX_SEQUENCE)] = 1
    """Microbatches per step, for gradient accumulation or for the pipeline."""
    row_groups: Annotated[int, Range(1, 1 << 16)] = 1
    """Row groups of a microbatch (Domino): one computes while another communicates. For tensor
    parallelism inside a pipeline, and for the sends of an expert axis."""
    virtual_stages: Annotated[int, Range(1, 10_000)] = 1
    """Interleaved stages per pipeline device. More stages make the bubble smaller."""
    layers_per_stage: tuple[Count, ...] = ()
    """Layers of each stage, such as 15,16,16,15; of each virtual stage in the model's order. Empty:
    equal, or else one more in the first stages."""
    schedule: Literal["1f1b", "gpipe", "zero_bubble"] = "1f1b"
    """Pipeline schedule. gpipe runs all forwards, then all backwards: simpler, as fast, and its
    memory grows with num_microbatches. zero_bubble computes some weight gradients where stages
    would be idle: a third of the bubble, for more memory."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage. 3: gather weights layer by layer. 1: gather all once per step; for pipelines,
    and for weights that are not sharded. 2: as 1, and scatter gradients layer by layer, so that
    their sums over microbatches are shards."""
    remat: Remat = "dots"
    """Remat policy, or values to save."""
    remat_layers: tuple[RematSlice, ...] = ()
    """Policies of some unrolled layers: full:::2 for every second layer, full::8 for the first
    eight. Later ones win; the other layers have `remat`. With a pipeline, slices are of the layers
    in each chunk of a stage."""
    remat_group: Count = 1
    """With layer_loop scan, layers of which only the first one's input is saved. The backward
    computes a group forward again. About the square root of the layers needs the least memory."""
    loss_chunks: Natural = 0
    """Chunks in which a device computes the loss. 1 is fastest. 0: chunks of 1 GiB."""
    layer_loop: Literal["scan", "unroll"] = "scan"
    """scan compiles faster; unroll runs faster on GPUs."""
    pipeline_save: Literal["residuals", "inputs"] = "residuals"
    """Activations that the pipeline stashes: the residuals that `remat` saves, or the inputs of
    each stage, from which it is recomputed."""
    context: Literal["allgather", "ring", "ulysses"] = "allgather"
    """How attention communicates over the sequence axis."""
    grad_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of FSDP's gradient reduction."""
    replica_reduction: Literal["float32", "bfloat16", "int8", "top_k"] = "float32"
    """How gradients of matrices are summed over replicas, whose link may be slow. int8: rounded to
    8 bits. top_k: only the largest. What these two leave out is added to the next step's gradients
    (error feedback)."""
    replica_top_k: Positive = 0.01
    """Share of the gradient that top_k sends."""
    gather_dtype: Literal["compute", "float8"] = "compute"
    """Dtype of ZeRO-3's weight gathers. float8 halves the bytes of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The processes of a run: how they connect, and when they time out."""

    detect: Literal["auto", "none", "jax", "jaxjob", "torch", "mpi", "flux", "slurm"] = "auto"
    """Launcher whose environment variables identify this process. auto: detect it. none: single
    process."""
    coordinator: str = ""
    """host:port on which process 0 listens. Empty: detect."""
    num_processes: Annotated[int, Range(0, MAX_AXIS)] = 0
    """Number of processes in the run. 0: detect."""
    process_id: int = -1
    """Index of this process, from 0. -1: detect."""
    network: Literal["auto", "none", "ib", "roce", "gib", "efa", "tcpxo", "tcpx", "tcp"] = "auto"
    """Network between hosts, for which variables of NCCL are set where the user has not. auto:
    detect it, for GPUs. none: set nothing."""
    connect_seconds: Annotated[int, Range(1, MAX_SECONDS)] = 300
    """Seconds that processes wait for each other at startup."""
    hang_seconds: Annotated[int, Range(0, MAX_SECONDS)] = 600
    """Maximum seconds of a step. A longer step is a hang: the process writes its stacks, and all
    processes end with code 124. 0: no limit."""
    slow_seconds: Annotated[int, Range(0, MAX_SECONDS)] = 3600
    """Maximum seconds of slower phases: startup, the first step, evaluation and saving. 0: no
    limit."""


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """Replicas that train on their own, with outer steps (DiLoCo)."""

    every: Annotated[int, Range(1, 1_000_000, 50)]
    """Inner steps between the outer steps of a weight (H)."""
    outer_learning_rate: Positive = 0.7
    """Learning rate of the outer step. 1, without momentum, averages the replicas' weights."""
    outer_momentum: Fraction = 0.9
    """Nesterov momentum of the outer step. 0: none."""
    fragments: Annotated[int, Range(1, 10_000)] = 1
    """Groups of layers that have their outer steps in turn, every / fragments steps apart
    (Streaming DiLoCo), so that less is sent at a time. 1: all weights at once."""
    outer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which replicas exchange outer gradients. They are summed in float32."""
    overlap: Annotated[int, Range(0, 1_000_000)] = 0
    """Inner steps during which replicas exchange a fragment's outer gradient (tau), a part in each.
    It is applied after them. 0: outer steps are taken at once, between inner steps."""
    mixing: Fraction = 0.5
    """Share of its own weights that a replica keeps when an overlapped outer step is applied
    (alpha). 0: it starts from the outer weights, and loses what it learned meanwhile."""
