"""The section `optimizer`: update rules, schedules, moments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Count, Fraction, Natural, NotNegative, Positive, Range, Reals
from jaxpar.config.schema.items import StepShare
from jaxpar.config.values import Value

#: The weights of a run: those that are trained, or their moving average.
Weights = Literal["trained", "ema"]
TRAINED: Weights = "trained"
AVERAGED: Weights = "ema"


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """A moving average of the weights (EMA)."""

    decay: Annotated[float, Reals(0, 1, above=True, below=True)] = 0.999
    """Decay rate."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype; bfloat16 uses stochastic rounding."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Update rule and learning-rate schedule."""

    name: Literal["adamw", "lion", "sgd", "muon", "adafactor"] | Value = "adamw"
    """Update rule; in Python also an `UpdateRule` of your own. muon: for the matrices of
    layers, with adamw for embeddings, head, router, norms and biases (docs/optimizers.md)."""
    learning_rate: Positive = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] | Value = "cosine"
    """Learning rate after the warm-up. wsd: constant, then linear decay over the last fifth. In
    Python also a `Schedule` of your own."""
    schedule_by: Literal["steps", "tokens"] | tuple[StepShare, ...] = "steps"
    """What the schedule counts. steps: optimizer steps. tokens: a step of fewer tokens than the
    largest counts as its share of one, also in warmup_steps and decay_steps; the run replaces the
    word by the shares (docs/optimizers.md#schedules-by-step)."""
    warmup_steps: Natural = 100
    """Steps of linear warm-up from 0; for a tenth of the steps in a run that is not longer."""
    warmup_fraction: Fraction = 0.0
    """Warm-up as a share of train.num_steps, in place of warmup_steps. 0: use warmup_steps."""
    decay_steps: Natural = 0
    """Steps of the decay to the final learning rate: after the warm-up, or at the end for wsd. 0:
    until the end of the run, or the last fifth for wsd."""
    min_lr_ratio: Annotated[float, Reals(0, 1)] = 0.1
    """Final learning rate as a fraction of the peak."""
    schedule_as_input: bool = False
    """Give the learning rates to the compiled step as an input, so that runs that differ in their
    schedule share a program (jaxpar.sweep sets it). False: the schedule is compiled into it."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment (the momentum of sgd). adafactor has none with 0."""
    beta2: Fraction = 0.95
    """Decay rate of the second moment. For adafactor the largest one."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip_norm: NotNegative = 1.0
    """Maximum global norm of the gradients; larger ones are scaled down. 0: no clipping."""
    first_moment_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Storage dtype of the first moment. bfloat16: rounded stochastically; 8bit: in blocks."""
    second_moment_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Storage dtype of adamw's second moment."""
    moment_block: Annotated[int, Range(16)] = 128
    """Largest number of neighboring elements that share a scale, for moments in 8bit."""
    ema: EmaConfig | None = None
    """Moving average of the weights. None: none is kept."""
    offload: bool = False
    """Keep the moments in host memory between steps and update them layer by layer."""
    offload_masters: bool = False
    """Keep the float32 master weights in host memory too; a step copies them in compute.dtype."""
    muon_momentum: Fraction = 0.95
    """Decay rate of muon's momentum. beta1 and beta2 apply to the parameters that AdamW updates."""
    muon_nesterov: bool = True
    """Whether muon uses Nesterov momentum."""
    muon_steps: Count = 5
    """Newton-Schulz iterations of muon."""
    muon_scale: Literal["rms", "width"] = "rms"
    """Size of muon's updates. rms: 0.2 sqrt(max(inputs, outputs)), so that adamw's learning rate
    and weight decay carry over. width: sqrt(max(1, outputs / inputs))."""
    muon_lr_ratio: Positive = 1.0
    """Learning rate of muon's matrices, relative to optimizer.learning_rate."""
    muon_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the Newton-Schulz iterations, and of the matrices that devices exchange."""
    qk_clip: NotNegative = 0.0
    """Largest attention logit: after an update, the query and key weights of heads above it shrink
    (MuonClip; Kimi K2: 100). For every rule. 0: no limit."""
