"""The sections `metrics` and `profile` of a config: sinks, what is recorded and traced."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.components.ranges import Count, Natural, Range
from jaxpar.config.values import Value


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What is recorded, in metrics.jsonl and in sinks."""

    layers: Literal["none", "cheap", "all"] = "none"
    """Record metrics of each layer; all: also the largest attention score, which is computed a
    second time."""
    layers_every: Count = 1
    """Steps from one record of layers and probes to the next: other steps run a program without
    them. A multiple of train.log_every, or 1."""

    tensorboard: bool = True
    """Write event files for TensorBoard to RUN/tensorboard. A failing sink is reported once."""
    wandb: str = ""
    """Log to this Weights & Biases PROJECT or ENTITY/PROJECT. Empty: off."""
    mlflow: str = ""
    """Log to this MLflow experiment; MLFLOW_TRACKING_URI names the server. Empty: off."""
    prometheus_port: Annotated[int, Range(0, 65535)] = 0
    """Port on which process 0 serves the latest metrics to Prometheus. 0: off."""
    prometheus_address: str = "127.0.0.1"
    """Address to serve them on. 0.0.0.0: every interface of this host, without a password."""
    sinks: tuple[Value, ...] = ()
    """Sinks of your own, each a `MetricSink`; set in Python."""
    gpus: bool = True
    """Record power, clocks, energy per token, memory and errors of GPUs, if nvidia-ml-py is
    installed."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Traces of a few steps, also on RUN/profile.request or SIGUSR1."""

    start: Natural = 0
    """First step to trace, counted from 1. 0: trace only when RUN/profile.request or SIGUSR1 asks
    for it."""
    num_steps: Count = 2
    """Steps per profile. More than 20 are written as several profiles of at most 20."""
    every: Natural = 0
    """Steps from the start of one profile to the next, from profile.start on. 0: no repeats."""
