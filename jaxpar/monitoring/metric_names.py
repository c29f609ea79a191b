"""The metrics of a run: each value in metrics.jsonl, with its unit and meaning."""

from jaxpar.config.metrics import METRICS as OF_STEPS
from jaxpar.config.metrics import Metric

#: By name in metrics.jsonl, in the order of docs/monitoring.md.
METRICS = {
    "z_loss_weight": Metric("training", "", "of train.z_loss_schedule at the step"),
    "mtp_loss_weight": Metric("training", "", "of train.mtp_loss_schedule at the step"),
    "learning_rate": Metric("training", "", "used for the step's update"),
    "global_batch_size": Metric("training", "", "sequences of the step, if sizes change"),
    "seq_len": Metric("training", "tokens", "of each of its sequences, if sizes change"),
    "tokens_seen": Metric("training", "tokens", "in all steps so far, including padding"),
    "epochs": Metric("training", "passes", "over each source so far; mixtures only"),
    "held_out_loss": Metric("evaluation", "nats per token", "cross entropy of held-out text"),
    "held_out_reward_accuracy": Metric("evaluation", "share", "reward_accuracy of held-out pairs"),
    "held_out_reward_margin": Metric("evaluation", "nats", "reward_margin of held-out pairs"),
    "held_out_chosen_reward": Metric("evaluation", "nats", "chosen_reward of held-out pairs"),
    "held_out_rejected_reward": Metric("evaluation", "nats", "rejected_reward of held-out pairs"),
    "bits_per_byte": Metric("evaluation", "bits per byte", "the same per byte of text, if known"),
    "ema_loss": Metric("evaluation", "nats per token", "of the weights' moving average"),
    "ema_bits_per_byte": Metric("evaluation", "bits per byte", "the same per byte, if known"),
    "set_loss": Metric("evaluation", "nats per token", "of each set of evaluation.sets"),
    "set_bits_per_byte": Metric("evaluation", "bits per byte", "the same per byte, if known"),
    "test_loss": Metric("evaluation", "nats per token", "of the test split, after the last step"),
    "test_bits_per_byte": Metric("evaluation", "bits per byte", "the same per byte, if known"),
    "task_scores": Metric("evaluation", "", "by task and metric, from a follower"),
    "followed_loss": Metric("evaluation", "nats per token", "of the split that a follower reads"),
    "followed_bits_per_byte": Metric("evaluation", "bits per byte", "the same per byte, if known"),
    "step_seconds": Metric("speed", "s", "mean step time since the last record, without pauses"),
    "tokens_per_second": Metric("speed", "tokens/s", "all devices together"),
    "tokens_per_second_per_device": Metric("speed", "tokens/s", "per device"),
    "mfu": Metric("speed", "share", "of the device's peak FLOP/s, attention counted as causal"),
    "mfu_full_attention": Metric("speed", "share", "the same, attention counted as full"),
    "data_wait_seconds": Metric("speed", "s", "mean wait of a step for its batch"),
    "host_seconds_median": Metric("speed", "s", "host time per step, in the median process"),
    "host_seconds_slowest": Metric("speed", "s", "the same, in the slowest process"),
    "gpu_watts": Metric("GPUs", "W", "mean power of a GPU of process 0 since the last record"),
    "gpu_clock_mhz": Metric("GPUs", "MHz", "clock of its slowest GPU's multiprocessors"),
    "gpu_celsius": Metric("GPUs", "°C", "temperature of its hottest GPU"),
    "gpu_memory_gib": Metric("GPUs", "GiB", "used on its fullest GPU, by all programs"),
    "joules_per_token": Metric("GPUs", "J/token", "energy of its GPUs, for their share of tokens"),
    "xid_errors": Metric("GPUs", "errors", "Xid errors of its GPUs since the run's start"),
    "store_waiting_steps": Metric("store", "checkpoints", "not in run.store yet"),
    "store_waiting_gb": Metric("store", "GB", "of them, and of files that grow"),
    "store_waiting_seconds": Metric("store", "s", "since the oldest of them was saved"),
    "memory_gib": Metric("memory", "GiB", "peak so far: fullest device, or the process on CPUs"),
}


def tag(name: str) -> str:
    """Return a metric's name in TensorBoard and W&B: GROUP/NAME.

    Args:     name: in metrics.jsonl; "epochs/SOURCE" for a source of a mixture.
    """
    known = OF_STEPS.get(name.partition("/")[0]) or METRICS.get(name.partition("/")[0])
    return f"{known.group if known else 'other'}/{name}"
