"""The sections of a run itself: its folder, checkpoints, and guards."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Count, Natural, Positive, Range
from jaxpar.config.rules.limits import MAX_CPU_DEVICES


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run folder, initial weights and devices."""

    dir: str = "runs/default"
    """Run folder, or s3://BUCKET/PREFIX. Resumed if it has a checkpoint."""
    store: str = ""
    """Address in an object store, s3:// or gs://, to which run.dir is uploaded, and from which it
    is downloaded where it is missing (docs/reliability.md). Empty: none."""
    init_from: str = ""
    """Run, published model or name on the Hugging Face Hub (org/model@revision) to take the initial
    weights from. Empty: random initialization."""
    init_changes: tuple[Literal["mixer.rope.theta", "mixer.rope.scaling", "mixer.window"], ...] = ()
    """Fields of layers that may differ from those of init_from, such as mixer.rope.theta for a
    longer context (docs/architectures.md). Empty: none."""
    cpu_devices: Annotated[int, Range(0, MAX_CPU_DEVICES)] = 0
    """Number of CPU devices to simulate in this process. 0: use the devices that JAX finds."""
    xla_flags: Literal["auto", "none"] = "auto"
    """auto: set the XLA flags measured for this GPU (jaxpar/runtime/gpus/). none: set none."""
    deterministic: bool = False
    """Give the same bits in every run on the same mesh and GPUs: deterministic attention, XLA
    kernels and NCCL algorithms, at a cost in speed. CPUs always do."""
    record_routing: tuple[Count, ...] = ()
    """Steps whose routing to record, such as 1,100,200: the experts of every token, in RUN/routing.
    `python -m jaxpar.profile --bench --routing FILE` repeats it. Empty: none."""
    verbose: bool = False
    """Print at start how the model is executed and which variables are set: manifest.json has both
    in any case."""
    compilation_cache: str = "~/.cache/jaxpar/xla"
    """Folder of the persistent compilation cache, used on GPUs. Empty: no cache."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Copies of the state in the memory of hosts, from which a launcher's restart resumes."""

    every: Annotated[int, Range(1, good=50)]
    """Steps between copies (docs/checkpoints.md#in-the-memory-of-hosts)."""
    copies: Natural = 1
    """Other hosts that also hold each piece of a copy, if there are as many."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints and whether to resume from one."""

    every: Natural = 500
    """Steps between saves. 0: never."""
    keep: Count = 3
    """Number of latest checkpoints to keep."""
    keep_every: Natural = 0
    """Also keep every checkpoint whose step is a multiple of this. 0: none."""
    best: str = ""
    """Also keep the one with the lowest loss on held_out, ema or a set's name. Empty: none."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume if there is a checkpoint. never: fail if there is one. must: fail if there is
    none."""
    save_failures_allowed: Natural = 3
    """Consecutive saves that may fail with a warning; one more ends the run with code 1."""
    memory: MemoryConfig | None = None
    """Copies of the state in the memory of hosts. None: none."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Reactions to non-finite values, spikes and corruption."""

    max_skips: Count = 3
    """Consecutive updates that are skipped as non-finite before the run ends with code 17."""
    spike: Literal["ignore", "tell", "rewind"] = "tell"
    """At a spike: tell it, or rewind: return to the last checkpoint and skip its batches."""
    spike_metric: str = "loss"
    """The metric that is watched, of every step. Of one by layer, the largest value counts."""
    spike_deviations: Positive = 10.0
    """Deviations above the median that count as a spike. A deviation is 1.48 MAD, or 1% of the
    median if that is more."""
    spike_window: Annotated[int, Range(1, 1_000_000)] = 64
    """Recent steps that a value is compared with. Detection starts once half of them have run."""
    spike_skip: Count = 4
    """Batches that a rewind skips, up to and including the one of the spike."""
    max_rewinds: Natural = 3
    """Maximum rewinds per run. One more spike ends it with code 17."""
    recent_steps: Annotated[int, Range(0, 1_000_000)] = 512
    """Steps to keep in RUN/recent.jsonl, for `jaxpar.checkpoint replay`. 0: as spike detection
    needs."""
    replica_check_every: Natural = 0
    """Steps between comparisons of the replicated state across devices. 0: never compare."""
    loss_scale: float = 65536.0
    """float16: initial loss scale, a power of two; halved on overflow."""
    loss_scale_interval: Count = 1000
    """float16: steps without overflow after which the loss scale is doubled."""
