"""The configuration: frozen dataclasses, one section per part of the system that reads it.

A config is made by `configs/NAME.py`'s `get_config()`, changed on the command line
(`command_line.py`), checked once by `validate.py`, and saved as JSON with the run. Every field
is documented here, and `python -m jaxpar.train --help SECTION` prints these lines.
"""

from dataclasses import dataclass, field
from typing import Literal

from jaxpar.config.model_schema import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where metrics go besides metrics.jsonl. A sink that fails is named once; training goes on."""

    tensorboard: bool = True
    """Write event files for TensorBoard to RUN/tensorboard."""
    wandb: str = ""
    """Weights & Biases: log to this PROJECT, or ENTITY/PROJECT. Empty: do not."""
    prometheus_port: int = 0
    """Process 0 serves the latest numbers to Prometheus on this port. 0: do not."""
    prometheus_address: str = "127.0.0.1"
    """Address that they are served on. 0.0.0.0: all of this host's; there is no password."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run lives and what it runs on."""

    dir: str = "runs/default"
    """Run folder: config, metrics, checkpoints. A folder that holds a checkpoint is resumed."""
    init_from: str = ""
    """A run or a published model whose weights a new run begins with. Empty: fresh weights."""
    cpu_devices: int = 0
    """Simulate this many CPU devices in this process. 0: use the devices that JAX finds."""
    xla_flags: Literal["auto", "none"] = "auto"
    """auto: set the XLA flags measured for this GPU (jaxpar/runtime/gpus/); none: leave them."""
    compilation_cache: str = "~/.cache/jaxpar/xla"
    """Folder of the persistent compilation cache, used on GPUs. Empty: no cache."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and size of a step."""

    num_steps: int = 1000
    """Optimizer steps in the whole run, resumed parts included."""
    global_batch_size: int = 32
    """Sequences per optimizer step, over all devices and microbatches."""
    seed: int = 0
    """Seeds the initial weights and the order of the data."""
    log_every: int = 10
    """Write a line of metrics every so many steps."""
    z_loss: float = 0.0
    """Weight of the squared log-partition penalty that keeps logits small (PaLM, section 5)."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens, in which sequences."""

    path: str = "data/stdlib"
    """Folder written by `python -m jaxpar.data prepare`, or Megatron, nanoGPT or llm.c tokens."""
    seq_len: int = 1024
    """Tokens in one training sequence."""
    document_mask: bool = True
    """Attention and positions stay inside a document. False: each sequence is one causal text."""
    prefetch: int = 2
    """Batches prepared ahead of the step, in the background."""
    mixture: str = ""
    """Sources instead of path, PATH:WEIGHT,PATH:WEIGHT, by share of sequences. Empty: only path."""
    held_out: str = ""
    """Tokens to evaluate on. Empty: the held-out splits of what is trained on."""
    eos_id: int | None = None
    """Token that ends a document, for files that do not mark documents (nanoGPT, llm.c)."""
    loss_on: Literal["targets", "all"] = "targets"
    """Tokens of chat data that are learnt: what the assistant says, or all. Else always all."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Tuning by low-rank adapters beside matrices that stay as they are."""

    rank: int = 0
    """Width of the adapters, which alone are trained. 0: no adapters, every weight is trained."""
    alpha: float = 16.0
    """What adapters add to a product is multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """Multiply it by alpha / sqrt(rank) instead (rsLoRA)."""
    targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    """Which of these projections have adapters, joined by commas."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The mesh and how work is cut over it."""

    auto: str = ""
    """Of these, what the planner chooses for the devices: all, or NAME,NAME. Empty: nothing."""
    pipeline: int = 1
    """Pipeline stages (PP)."""
    replica: int = 1
    """Whole copies of the sharded model (DDP; the outer axis of HSDP)."""
    data: int = -1
    """Ways that batch rows and parameters are sharded (FSDP). -1: the devices that are left."""
    expert: int = 1
    """Expert-parallel ways. Experts do not use it yet: it acts as more of `data`."""
    sequence: int = 1
    """Ways that one sequence is cut (context parallelism)."""
    tensor: int = 1
    """Tensor-parallel ways, with sequence parallelism (TP)."""
    num_microbatches: int = 1
    """Microbatches per step: gradient accumulation, or the pipeline's microbatches."""
    row_groups: int = 1
    """Groups of rows that take turns, for tensor in a pipeline: one communicates, one computes."""
    virtual_stages: int = 1
    """Stages per pipeline device, interleaved. More of them make a smaller bubble."""
    zero: Literal[1, 3] = 3
    """3: gather weights layer by layer. 1: all once per step (with a pipeline, or none sharded)."""
    remat: str = "dots"
    """Saved for the backward: none | dots | dots_offload | attn_out | full | offload, or names."""
    loss_chunks: int = 0
    """Parts of a device's tokens that the loss takes in turn: 1 is fastest. 0: of 1 GiB each."""
    layer_loop: Literal["scan", "unroll"] = "scan"
    """scan compiles fastest; unroll runs fastest on GPUs."""
    pipeline_save: Literal["residuals", "inputs"] = "residuals"
    """What the 1F1B ring keeps: residuals under `remat`, or stage inputs (stage recomputed)."""
    context: Literal["allgather", "ring", "ulysses"] = "allgather"
    """How attention crosses the sequence axis."""
    grad_reduce: Literal["float32", "bfloat16"] = "float32"
    """Precision in which FSDP sums gradients over devices."""
    gather_dtype: Literal["compute", "float8"] = "compute"
    """Dtype in which ZeRO-3 gathers a layer's matrices; float8 is half of bfloat16's bytes."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Update rule and learning-rate schedule."""

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    """Update rule, from optax; others are added from outside (jaxpar/config/registry.py)."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up. wsd: stable, then linear decay over the last fifth."""
    warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    beta1: float = 0.9
    """Decay of the first moment (momentum for sgd)."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms and biases are exempt."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm. 0: never."""
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the first moment is kept; to bfloat16 it is rounded stochastically."""
    second_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """The same for the second moment, of adamw."""
    offload: bool = False
    """Keep the moments in host memory between steps, and update them layer by layer."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved and what happens if the run folder already holds one."""

    every: int = 500
    """Save every so many steps, and at the end. 0: never."""
    keep: int = 3
    """Latest checkpoints to keep."""
    keep_every: int = 0
    """Also keep, for ever, each checkpoint whose step is a multiple of this. 0: none."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume if a checkpoint is there; never: refuse to; must: fail without one."""
    save_failures_allowed: int = 3
    """Saves in a row that may fail, with a warning, before the run ends with code 1."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What happens when numbers go wrong."""

    max_skips: int = 3
    """Updates skipped in a row, for a non-finite loss or gradient, that end the run: code 17."""
    spike: Literal["ignore", "tell", "rewind"] = "tell"
    """At a loss spike: tell it, or go back to the last checkpoint and leave out its batches."""
    spike_deviations: float = 10.0
    """A spike is so many deviations (1.48 MAD, at least 1% of the median) above the median."""
    spike_window: int = 64
    """Steps whose losses a spike is measured against; none is seen before half are there."""
    spike_skip: int = 4
    """Batches that a rewind leaves out, the last of them the spike's."""
    max_rewinds: int = 3
    """Rewinds in a run. One more spike ends it with code 17."""
    recent_steps: int = 512
    """Steps whose records RUN/recent.jsonl keeps, for `jaxpar.replay`; 0: what spikes need."""
    replica_check_every: int = 0
    """Compare the copies that devices hold of the state every so many steps. 0: never."""
    loss_scale: float = 65536.0
    """float16: what the loss is multiplied with at first, a power of two; halved on overflow."""
    loss_scale_interval: int = 1000
    """float16: steps without overflow after which the scale is doubled."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss during training."""

    every: int = 500
    """Evaluate every so many steps, and at the end. 0: never."""
    num_batches: int = 8
    """Global batches of held-out text per evaluation, always the same ones."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Tracing of a few steps, to RUN/profiles; RUN/profile.request and SIGUSR1 ask for it too."""

    start: int = 0
    """First step to trace, counted from 1. 0: none, unless asked for while the run goes."""
    num_steps: int = 2
    """Steps in a trace, 20 at most."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The processes of a run: how they meet, and when they give one another up."""

    detect: Literal["auto", "none", "jax", "jaxjob", "torch", "mpi", "slurm"] = "auto"
    """Whose variables say which process this is. auto: whichever are set; none: one process."""
    coordinator: str = ""
    """host:port on which process 0 listens. Empty: as detected."""
    num_processes: int = 0
    """Processes in the run. 0: as detected."""
    process_id: int = -1
    """This process, from 0. -1: as detected."""
    connect_seconds: int = 300
    """How long processes wait for one another at the start."""
    hang_seconds: int = 600
    """A step that takes longer is a hang: stacks are written, and all end with 124. 0: never."""
    slow_seconds: int = 3600
    """The same limit for what may take longer: start, first step, evaluation, saving."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, completely described."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
