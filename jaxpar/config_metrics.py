"""The section of the config about where metrics go, besides metrics.jsonl and the console."""

from dataclasses import dataclass


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
