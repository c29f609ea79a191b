"""What a run measures: every number of metrics.jsonl, with its unit and its meaning."""

from typing import NamedTuple


class Metric(NamedTuple):
    """A number that a run writes down."""

    group: str
    """The tab that it is under in TensorBoard and W&B."""
    unit: str
    meaning: str


#: By name in metrics.jsonl, in the order of docs/monitoring.md.
METRICS = {
    "loss": Metric("training", "nats per token", "cross entropy of the step, over labeled tokens"),
    "grad_norm": Metric("training", "", "global norm of the gradient, before clipping"),
    "learning_rate": Metric("training", "", "of the step's update"),
    "skipped": Metric("training", "updates", "skipped so far, for a non-finite loss or gradient"),
    "loss_scale": Metric("training", "", "what the loss was multiplied with; float16 alone"),
    "num_tokens": Metric("training", "tokens", "labeled tokens of the step"),
    "tokens_seen": Metric("training", "tokens", "of all steps so far, padding included"),
    "epochs": Metric("training", "passes", "over each source so far; mixtures alone"),
    "held_out_loss": Metric("evaluation", "nats per token", "cross entropy of held-out text"),
    "bits_per_byte": Metric("evaluation", "bits per byte", "the same by bytes of text, if known"),
    "step_seconds": Metric("speed", "s", "a step, mean since the last record; pauses left out"),
    "tokens_per_second": Metric("speed", "tokens/s", "of all devices"),
    "tokens_per_second_per_device": Metric("speed", "tokens/s", "of one device"),
    "mfu": Metric("speed", "share", "of the device's peak FLOP/s, attention counted as causal"),
    "mfu_full_attention": Metric("speed", "share", "the same, attention counted as full"),
    "data_wait_seconds": Metric("speed", "s", "a step's wait for its batch, mean"),
    "host_seconds_median": Metric("speed", "s", "a step, of the middle process without devices"),
    "host_seconds_slowest": Metric("speed", "s", "the same, of the slowest process"),
    "memory_gib": Metric("memory", "GiB", "peak so far, fullest device; on CPUs the process"),
}


def tag(name: str) -> str:
    """A metric's name in TensorBoard and W&B: GROUP/NAME.

    Args:     name: in metrics.jsonl; "epochs/SOURCE" for one of a mixture's.
    """
    known = METRICS.get(name.partition("/")[0])
    return f"{known.group if known else 'other'}/{name}"
