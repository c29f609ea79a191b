"""The configuration: frozen dataclasses, one section for each part of the system.

`get_config()` in `configs/NAME.py` returns a config. The command line overrides its fields
(`command_line.py`), `validate.py` checks it once, and the run saves it as JSON. The text under
each field is its documentation: `python -m jaxpar.train --help SECTION` prints it.
"""

from dataclasses import dataclass, field
from typing import Literal

from jaxpar.config.metrics_schema import MetricsConfig, ProfileConfig
from jaxpar.config.model_schema import ModelConfig
from jaxpar.config.objective_schema import DistillConfig, DpoConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run folder, initial weights and devices."""

    dir: str = "runs/default"
    """Run folder, or an address, s3://BUCKET/PREFIX. The run resumes if it has a checkpoint."""
    store: str = ""
    """Address in an object store, s3:// or gs://, to which run.dir is uploaded, and from which it
    is downloaded where it is missing (docs/object_stores.md). Empty: none."""
    init_from: str = ""
    """Run, published model or name on the Hugging Face Hub (org/model@revision) to take the initial
    weights from. Empty: random initialization."""
    init_changes: str = ""
    """Fields of the model that may differ from those of init_from, separated by commas, such as
    rope_theta,rope_scaling for a longer context (docs/long_context.md). Empty: none."""
    cpu_devices: int = 0
    """Number of CPU devices to simulate in this process. 0: use the devices that JAX finds."""
    xla_flags: Literal["auto", "none"] = "auto"
    """auto: set the XLA flags measured for this GPU (jaxpar/runtime/gpus/). none: set none."""
    deterministic: bool = False
    """Give the same bits in every run on the same mesh and GPUs: deterministic attention, XLA
    kernels and NCCL algorithms, at a cost in speed. CPUs always do."""
    record_routing: str = ""
    """Steps whose routing to record, such as 1,100,200: the experts of every token, in RUN/routing.
    `python -m jaxpar.bench train --routing FILE` repeats it. Empty: none."""
    compilation_cache: str = "~/.cache/jaxpar/xla"
    """Folder of the persistent compilation cache, used on GPUs. Empty: no cache."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and batch size."""

    num_steps: int = 1000
    """Total optimizer steps, over all resumes."""
    num_tokens: int = 0
    """Length of the run in tokens, with padding: sets num_steps, rounded up. 0: by num_steps."""
    num_epochs: float = 0.0
    """Length of the run in passes over the training text, such as 1.5, but not over a mixture: sets
    num_tokens once the data is open. 0: num_tokens or num_steps decides."""
    global_batch_size: int = 32
    """Sequences per optimizer step, summed over all devices and microbatches."""
    global_batch_tokens: int = 0
    """Tokens per optimizer step, padding included: sets global_batch_size to that many in sequences
    of data.seq_len. 0: global_batch_size decides."""
    batch_schedule: str = ""
    """Global batch sizes by step: 0:SIZE;STEP:SIZE, each after STEP steps. The largest is
    global_batch_size. A smaller batch has fewer microbatches of the same size. Empty: all steps
    have global_batch_size."""
    micro_batch_size: int = 0
    """Sequences of a microbatch on each batch shard. The run sets parallel.num_microbatches to
    match. 0: the number of microbatches decides."""
    early_stop_patience: int = 0
    """Evaluations in a row without a lower loss of checkpoint.best that end the run. 0: never."""
    seed: int = 0
    """Seed of the initial weights and the data order."""
    log_every: int = 10
    """Steps between lines of metrics."""
    z_loss: float = 0.0
    """Weight of the squared log-partition penalty, which keeps logits small (PaLM, section 5)."""
    z_loss_schedule: str = ""
    """Weights in place of z_loss, by step: STEP:WEIGHT;STEP:WEIGHT, on straight lines between them,
    and constant before the first and after the last. Empty: z_loss at every step."""
    balance_loss: float = 0.0
    """Weight of the loss that balances experts, per layer. It is 1 if all have the same load."""
    balance_over: Literal["sequence", "batch"] = "sequence"
    """Tokens over which experts are balanced: each sequence, or all sequences of a microbatch on
    all devices, which constrains the router less."""
    router_z_loss: float = 0.0
    """Weight of the squared log-partition penalty of each layer's router (ST-MoE)."""
    router_bias_rate: float = 1e-3
    """Step size of model.router_bias (DeepSeek-V3: 1e-3)."""
    mtp_loss: float = 0.1
    """Weight of the mean loss of model.mtp_depth's modules (DeepSeek-V3: 0.3, then 0.1)."""
    mtp_loss_schedule: str = ""
    """Weights in place of mtp_loss, by step, like z_loss_schedule."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training and evaluation data."""

    path: str = "data/stdlib"
    """Dataset from `python -m jaxpar.data prepare`, or token files of Megatron, nanoGPT, llm.c."""
    seq_len: int = 1024
    """Tokens per training sequence."""
    length_schedule: str = ""
    """Lengths of the sequences by step: 0:LENGTH;STEP:LENGTH, each after STEP steps. They divide
    the longest, seq_len. Empty: seq_len."""
    length_keeps: Literal["tokens", "sequences"] = "tokens"
    """What length_schedule leaves as it is. tokens: shorter sequences are more, so that a step has
    as many tokens. sequences: a step has as many sequences."""
    document_mask: bool = True
    """Restrict attention to a document and restart its positions. False: plain causal attention."""
    prefetch: int = 2
    """Batches to prepare in the background, ahead of the current step."""
    tokenize_workers: int = 2
    """Processes that tokenize streamed datasets, for each process of the run. 0: it does itself."""
    mixture: str = ""
    """Datasets to mix in place of data.path: PATH:WEIGHT,PATH:WEIGHT. Weights are shares of the
    sequences. Empty: only data.path."""
    mixture_schedule: str = ""
    """Other weights of data.mixture after some steps: STEP:WEIGHT,WEIGHT;STEP:WEIGHT,WEIGHT, one
    weight for each source, in its order. 0 leaves a source out. Empty: the weights stay."""
    held_out: str = ""
    """Dataset to evaluate on. Empty: the held-out splits of the training data."""
    eos_id: int | None = None
    """End-of-document token, for formats that do not mark documents (nanoGPT, llm.c)."""
    loss_on: Literal["targets", "all"] = "targets"
    """Tokens of chat data in the loss. targets: the assistant's. all: every token. Other data
    always uses every token."""
    shuffle: Literal["auto", "feistel", "grain"] = "auto"
    """Random order of the sequences. auto: feistel in a new run, the same as before in a resumed
    one. grain: the order of earlier versions, which repeats a sequence at some lengths."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Fine-tuning with low-rank adapters on frozen base weights (LoRA)."""

    rank: int = 0
    """Rank of the adapters; only they are trained. 0: no adapters, all weights are trained."""
    alpha: float = 16.0
    """Adapter outputs are multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """Multiply them by alpha / sqrt(rank) instead (rsLoRA)."""
    targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    """Projections with adapters, separated by commas."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The device mesh, and how model and batch are split over it."""

    auto: str = ""
    """Layout fields for the planner to choose: all, or NAME,NAME. Empty: none."""
    pipeline: int = 1
    """Pipeline-parallel stages (PP)."""
    replica: int = 1
    """Replicas of the sharded model (DDP; the outer axis of HSDP)."""
    data: int = -1
    """Shards of the batch and the parameters (FSDP). -1: all remaining devices."""
    expert: int = 1
    """Shards of the experts (EP): each device has some experts, and receives the tokens of all
    devices of the axis. Everything else treats it as a larger `data`."""
    expert_tensor: int = 0
    """Tensor ranks over which each expert is split (Megatron's expert tensor parallel size). 0: all
    of them. 1: none; experts are whole, and spread over the tensor ranks of an expert rank too."""
    expert_dispatch: Literal["auto", "tokens", "rows"] = "auto"
    """What devices of an expert axis send. tokens: each token to all of them. rows: a row for each
    expert of a token, to the device of that expert. auto: whichever sends fewer bytes."""
    expert_slack: float = 1.25
    """Rows of the experts' buffer on an expert axis, as a multiple of a device's equal share. Rows
    that do not fit are computed in further rounds: a larger one needs memory, a smaller one time.
    No row is dropped. With dispatch by rows, also the rows that two devices exchange in a round."""
    sequence: int = 1
    """Shards of each sequence (context parallelism)."""
    tensor: int = 1
    """Size of the tensor-parallel axis, with sequence parallelism (TP)."""
    num_microbatches: int = 1
    """Microbatches per step, for gradient accumulation or for the pipeline."""
    row_groups: int = 1
    """Row groups of a microbatch (Domino): one computes while another communicates. For tensor
    parallelism inside a pipeline, and for the sends of an expert axis."""
    virtual_stages: int = 1
    """Interleaved stages per pipeline device. More stages make the bubble smaller."""
    layers_per_stage: str = ""
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
    remat: str = "dots"
    """Rematerialization policy: none | dots | dots_offload | attn_out | full | offload, or the
    names of the values to save for the backward pass."""
    remat_layers: str = ""
    """Policies of some unrolled layers, as SLICE=POLICY, separated by semicolons: ::2=full for
    every second layer, :8=full for the first eight. Later ones win; the other layers have `remat`.
    With a pipeline, slices are of the layers in each chunk of a stage."""
    remat_group: int = 1
    """With layer_loop scan, layers of which only the first one's input is saved. The backward
    computes a group forward again. About the square root of the layers needs the least memory."""
    loss_chunks: int = 0
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
    gather_dtype: Literal["compute", "float8"] = "compute"
    """Dtype of ZeRO-3's weight gathers. float8 halves the bytes of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Update rule and learning-rate schedule."""

    name: Literal["adamw", "lion", "sgd", "muon", "adafactor"] = "adamw"
    """Update rule, or one registered with jaxpar/config/registry.py. muon: for the matrices of
    layers, with adamw for embeddings, head, router, norms and biases (docs/optimizers.md)."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. wsd: constant, then linear decay over the last fifth."""
    schedule_by: str = "steps"
    """What the schedule counts. steps: optimizer steps. tokens: a step of fewer tokens than the
    largest counts as its share of one, also in warmup_steps and decay_steps; the run replaces the
    word by the shares, STEP:SHARE;STEP:SHARE (docs/optimizers.md#schedules-by-step)."""
    warmup_steps: int = 100
    """Steps of linear warm-up from 0; for a tenth of the steps in a run that is not longer."""
    warmup_fraction: float = 0.0
    """Warm-up as a share of train.num_steps, in place of warmup_steps. 0: use warmup_steps."""
    decay_steps: int = 0
    """Steps of the decay to the final learning rate: after the warm-up, or at the end for wsd. 0:
    until the end of the run, or the last fifth for wsd."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    schedule_as_input: bool = False
    """Give the learning rates to the compiled step as an input, so that runs that differ in their
    schedule share a program (jaxpar.sweep sets it). False: the schedule is compiled into it."""
    beta1: float = 0.9
    """Decay rate of the first moment (the momentum of sgd). adafactor has none with 0."""
    beta2: float = 0.95
    """Decay rate of the second moment. For adafactor the largest one."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradients; larger ones are scaled down. 0: no clipping."""
    first_moment_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Storage dtype of the first moment. bfloat16: rounded stochastically; 8bit: in blocks."""
    second_moment_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Storage dtype of adamw's second moment."""
    moment_block: int = 128
    """Largest number of neighboring elements that share a scale, for moments in 8bit."""
    ema_decay: float = 0.0
    """Decay rate of a moving average of the weights (EMA), such as 0.999. 0: none."""
    ema_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of the moving average; bfloat16 uses stochastic rounding."""
    offload: bool = False
    """Keep the moments in host memory between steps and update them layer by layer."""
    offload_masters: bool = False
    """Keep the float32 master weights in host memory too; a step copies them in model.dtype."""
    muon_momentum: float = 0.95
    """Decay rate of muon's momentum. beta1 and beta2 apply to the parameters that AdamW updates."""
    muon_nesterov: bool = True
    """Whether muon uses Nesterov momentum."""
    muon_steps: int = 5
    """Newton-Schulz iterations of muon."""
    muon_scale: Literal["rms", "width"] = "rms"
    """Size of muon's updates. rms: 0.2 sqrt(max(inputs, outputs)), so that adamw's learning rate
    and weight decay carry over. width: sqrt(max(1, outputs / inputs))."""
    muon_lr_ratio: float = 1.0
    """Learning rate of muon's matrices, relative to optimizer.learning_rate."""
    muon_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the Newton-Schulz iterations, and of the matrices that devices exchange."""
    qk_clip: float = 0.0
    """Largest attention logit: after an update, the query and key weights of heads above it shrink
    (MuonClip; Kimi K2: 100). For every rule. 0: no limit."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints and whether to resume from one."""

    every: int = 500
    """Steps between checkpoints; the last step is saved too. 0: never."""
    keep: int = 3
    """Number of latest checkpoints to keep."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this. 0: none."""
    best: str = ""
    """Also keep the one with the lowest loss on held_out, ema or a set's name. Empty: none."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume if there is a checkpoint. never: fail if there is one. must: fail if there is
    none."""
    save_failures_allowed: int = 3
    """Consecutive saves that may fail with a warning; one more ends the run with code 1."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Reactions to non-finite values, loss spikes and corruption."""

    max_skips: int = 3
    """Consecutive updates that are skipped as non-finite before the run ends with code 17."""
    spike: Literal["ignore", "tell", "rewind"] = "tell"
    """At a loss spike: tell it, or rewind: return to the last checkpoint and skip its batches."""
    spike_deviations: float = 10.0
    """Deviations above the median loss that count as a spike. A deviation is 1.48 MAD, or 1% of
    the median if that is more."""
    spike_window: int = 64
    """Recent steps that a loss is compared with. Detection starts once half of them have run."""
    spike_skip: int = 4
    """Batches that a rewind skips, up to and including the one of the spike."""
    max_rewinds: int = 3
    """Maximum rewinds per run. One more spike ends it with code 17."""
    recent_steps: int = 512
    """Steps to keep in RUN/recent.jsonl, for `jaxpar.replay`. 0: what spike detection needs."""
    replica_check_every: int = 0
    """Steps between comparisons of the replicated state across devices. 0: never compare."""
    loss_scale: float = 65536.0
    """float16: initial loss scale, a power of two; halved on overflow."""
    loss_scale_interval: int = 1000
    """float16: steps without overflow after which the loss scale is doubled."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out data during training."""

    every: int = 500
    """Steps between evaluations; the last step is evaluated too. 0: never."""
    num_batches: int = 8
    """Global batches per evaluation, the same ones every time."""
    split: Literal["val", "test"] = "val"
    """Split of the data to evaluate on. test: the split that no decision depended on."""
    sets: str = ""
    """Further sets, each with its own loss: NAME=PATH,NAME=PATH or NAME=PATH:SPLIT. Empty: none."""
    test: bool = False
    """Also evaluate on the test split, once, after the last step."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The processes of a run: how they connect, and when they time out."""

    detect: Literal["auto", "none", "jax", "jaxjob", "torch", "mpi", "slurm"] = "auto"
    """Launcher whose environment variables identify this process. auto: detect it. none: single
    process."""
    coordinator: str = ""
    """host:port on which process 0 listens. Empty: detect."""
    num_processes: int = 0
    """Number of processes in the run. 0: detect."""
    process_id: int = -1
    """Index of this process, from 0. -1: detect."""
    connect_seconds: int = 300
    """Seconds that processes wait for each other at startup."""
    hang_seconds: int = 600
    """Maximum seconds of a step. A longer step is a hang: the process writes its stacks, and all
    processes end with code 124. 0: no limit."""
    slow_seconds: int = 3600
    """Maximum seconds of slower phases: startup, the first step, evaluation and saving. 0: no
    limit."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The complete description of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
