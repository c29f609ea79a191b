"""The sections of training and evaluation: steps, batches, losses, adapters, held-out text."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Count, Natural, Needs, NotNegative, Positive, Range
from jaxpar.config.rules.limits import MAX_SEQUENCE
from jaxpar.config.schema.items import BatchSize, EvaluationSet, LossWeight
from jaxpar.config.values import Value


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and batch size."""

    num_steps: Count = 1000
    """Optimizer steps, over all resumes."""
    num_tokens: Annotated[int, Range(0, 10**16)] = 0
    """Length of the run in tokens, with padding: sets num_steps, rounded up. 0: by num_steps."""
    num_epochs: NotNegative = 0.0
    """Length of the run in passes over the training text, such as 1.5, but not over a mixture: sets
    num_tokens once the data is open. 0: num_tokens or num_steps decides."""
    global_batch_size: Annotated[int, Range(1, MAX_SEQUENCE)] = 32
    """Sequences per optimizer step, summed over all devices and microbatches."""
    global_batch_tokens: Natural = 0
    """Tokens per optimizer step, padding included: sets global_batch_size to that many in sequences
    of data.seq_len. 0: global_batch_size decides."""
    batch_schedule: tuple[BatchSize, ...] = ()
    """Global batch sizes by step. The largest is global_batch_size. A smaller batch has fewer
    microbatches of the same size. Empty: all steps have global_batch_size."""
    micro_batch_size: Annotated[int, Range(0, MAX_SEQUENCE)] = 0
    """Sequences of a microbatch on each batch shard. The run sets parallel.num_microbatches to
    match. 0: the number of microbatches decides."""
    early_stop_patience: Natural = 0
    """Evaluations in a row without a lower loss of checkpoint.best that end the run. 0: never."""
    seed: Natural = 0
    """Seed of the initial weights and the data order."""
    log_every: Count = 10
    """Steps between lines of metrics."""
    z_loss: NotNegative = 0.0
    """Weight of the squared log-partition penalty, which keeps logits small (PaLM, section 5)."""
    z_loss_schedule: tuple[LossWeight, ...] = ()
    """Weights in place of z_loss, by step, on straight lines between them, and constant before the
    first and after the last. Empty: z_loss at every step."""
    balance_loss: NotNegative = 0.0
    """Weight of the loss that balances experts, per layer. It is 1 if all have the same load."""
    balance_over: Literal["sequence", "batch"] = "sequence"
    """Tokens over which experts are balanced: each sequence, or all sequences of a microbatch on
    all devices, which constrains the router less."""
    router_z_loss: NotNegative = 0.0
    """Weight of the squared log-partition penalty of each layer's router (ST-MoE)."""
    router_bias_rate: Annotated[Positive, Needs("feed_forward.router.balancing_bias")] = 1e-3
    """Step size of router.balancing_bias (DeepSeek-V3: 1e-3)."""
    mtp_loss: NotNegative = 0.1
    """Weight of the mean loss of model.mtp_depth's modules (DeepSeek-V3: 0.3, then 0.1)."""
    mtp_loss_schedule: tuple[LossWeight, ...] = ()
    """Weights in place of mtp_loss, by step, like z_loss_schedule."""
    loss: Value | None = None
    """A loss of your own, a `jaxpar.Loss`, in place of the cross entropy of the next token; set in
    Python. None: that."""
    probes: tuple[Value, ...] = ()
    """Metrics of what layers compute, each a `jaxpar.Probe`; set in Python."""
    post_updates: tuple[Value, ...] = ()
    """What changes the weights after each update, in order, each a `jaxpar.PostUpdate`; set in
    Python."""
    callbacks: tuple[Value, ...] = ()
    """What acts between steps, in order, each a `jaxpar.Callback`; set in Python."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Fine-tuning with low-rank adapters on frozen base weights (LoRA)."""

    rank: Annotated[int, Range(1, good=16)]
    """Rank of the adapters; only they are trained."""
    alpha: Positive = 16.0
    """Adapter outputs are multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """Multiply them by alpha / sqrt(rank) instead (rsLoRA)."""
    targets: tuple[str, ...] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Names of the projections with adapters."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out data during training."""

    every: Natural = 500
    """Steps between evaluations; the last step is evaluated too. 0: never."""
    num_batches: Count = 8
    """Global batches per evaluation, the same ones every time; fewer if the data has fewer."""
    split: Literal["val", "test"] = "val"
    """Split of the data to evaluate on. test: the split that no decision depended on."""
    sets: tuple[EvaluationSet, ...] = ()
    """Further sets, each with its own loss. Empty: none."""
    test: bool = False
    """Also evaluate on the test split, once, after the last step."""
