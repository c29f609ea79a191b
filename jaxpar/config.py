"""The configuration: frozen dataclasses, one section per part of the system that reads it.

A config is made by `configs/NAME.py`'s `get_config()`, changed on the command line (`cli.py`),
checked once by `validation.py`, and saved as JSON with the run. Every field is documented here,
and `python -m jaxpar.train CONFIG --help` prints these lines.
"""

import dataclasses
import difflib
import functools
import shlex
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpar.config_metrics import MetricsConfig as MetricsConfig
from jaxpar.config_model import ModelConfig as ModelConfig
from jaxpar.config_model import RopeScaling as RopeScaling


class ConfigError(ValueError):
    """A config value that cannot work: names the field, its value, the rule and a fix."""

    def __init__(self, field: str, value: Any, rule: str, fix: str):
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        super().__init__(f"{field} = {value!r}: {rule}. Fix: {fix}.")


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
    """auto: set the measured XLA flags for this GPU (jaxpar/xla_flags.py); none: leave them."""
    compilation_cache: str = "~/.cache/jaxpar/xla"
    """Folder of the persistent compilation cache, used on GPUs. Empty: no cache."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and size of a step."""

    num_steps: int = 1000
    """Optimiser steps in the whole run, resumed parts included."""
    global_batch_size: int = 32
    """Sequences per optimiser step, over all devices and microbatches."""
    seed: int = 0
    """Seeds the initial weights and the order of the data."""
    log_every: int = 10
    """Write a line of metrics every so many steps."""
    z_loss: float = 0.0
    """Weight of the squared log-partition penalty that keeps logits small (PaLM, section 5)."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens, in which windows."""

    path: str = "data/stdlib"
    """Folder written by `python -m jaxpar.data prepare`, or Megatron, nanoGPT or llm.c tokens."""
    seq_len: int = 1024
    """Tokens in one training window."""
    document_mask: bool = True
    """Attention stays inside a document and positions restart with it. False: one causal window."""
    prefetch: int = 2
    """Batches prepared ahead of the step, in the background."""
    mixture: str = ""
    """Sources in place of path, by share of windows: PATH:WEIGHT,PATH:WEIGHT. Empty: path alone."""
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
    """Update rule, from optax; others are added from outside (jaxpar/extensions.py)."""
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
    """Updates left out in a row, loss or gradient being no number, that end the run: code 17."""
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


# ---------------------------------------------------------------------------- fields by path


def section_of(hint: Any) -> Any:
    """The section class in a field's type, also in `Section | None`; None for a plain value."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


@functools.cache
def field_types(cls: Any = Config, prefix: str = "") -> dict[str, Any]:
    """The type of every field by path, sections and their fields: {"train.seed": int, ...}."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        found[prefix + name] = hint
        if section_of(hint) is not None:
            found |= field_types(section_of(hint), f"{prefix}{name}.")
    return found


def leaf_paths() -> list[str]:
    """Every field that is no section, by path, those of optional sections included."""
    return [path for path, hint in field_types().items() if section_of(hint) is None]


@functools.cache
def default_of(path: str) -> Any:
    """A field's default; inside an optional section, what it is once that section is set."""
    node: Any = Config()
    for key in path.split("."):
        node = _child(node, key)
    return node


def _child(node: Any, key: str) -> Any:
    """A field's value; where an optional section is None, that section's defaults."""
    section = section_of(typing.get_type_hints(type(node))[key])
    value = getattr(node, key)
    return section() if value is None and section is not None else value


def value_of(cfg: "Config", path: str) -> Any:
    """A field's value: `value_of(cfg, "model.num_layers")`."""
    return functools.reduce(getattr, path.split("."), cfg)


def require(ok: bool, cfg: "Config", path: str, rule: str, *ways: str) -> None:
    """Raises:   ConfigError for the field, with `ways` out, unless `ok`."""
    if not ok:
        raise ConfigError(path, value_of(cfg, path), rule, "use " + ", or ".join(ways))


def unknown_field(path: str, value: Any, show: Callable[[str], str] = str) -> ConfigError:
    """The error for a path that names no field, with what was probably meant.

    Args:     show: how the reader would write a path.
    """
    section, _, name = path.rpartition(".")
    names = {known: known.rpartition(".")[2] for known in leaf_paths()}
    beside = [known for known in names if known.startswith(section + ".")]
    meant = [known for known in names if names[known] == name]
    if not meant and beside:
        near = difflib.get_close_matches(name, [names[known] for known in beside], n=1)
        meant = [known for known in beside if names[known] in near]
    elif not meant:
        meant = difflib.get_close_matches(path, names, n=1)
    if meant:
        fix = "use " + " or ".join(map(show, meant))
    elif beside:
        fix = "use one of " + ", ".join(map(show, beside))
    else:
        sections = ", ".join(field.name for field in dataclasses.fields(Config))
        fix = f"name it SECTION.FIELD, with a section of {sections}"
    return ConfigError(path, value, "is not a field of the config", fix)


def flag(path: str, value: Any = ...) -> str:
    """A field as the command line sets it: "--model.num-heads 8"; without a value, its name.

    As a shell reads it: a value with spaces is quoted.
    """
    name = "--" + path.replace("_", "-")
    return name if value is ... else f"{name} {shlex.quote(str(value))}"


def replace(cfg: Config, **values: Any) -> Config:
    """A copy with some fields changed, named by path: `replace(cfg, **{"model.num_layers": 2})`.

    Setting a field of an optional section that is None starts from that section's defaults.

    Raises:   ConfigError for a path that names no field.
    """
    for path, value in values.items():
        if path not in field_types():
            raise unknown_field(path, value)
        cfg = _replaced(cfg, path.split("."), value)
    return cfg


def _replaced(node: Any, keys: list[str], value: Any) -> Any:
    if len(keys) > 1:
        value = _replaced(_child(node, keys[0]), keys[1:], value)
    return dataclasses.replace(node, **{keys[0]: value})
