"""The largest values of fields and options: far above what is useful, below what breaks a program.

`numbers.py` applies those of fields. Programs apply `Range` to their own options
(`jaxpar/runtime/options.py`).
"""

from dataclasses import dataclass

#: Largest integer: steps, seeds, sizes and tokens are int32 on the devices.
MAX_INT = 2**31 - 1

#: Most simulated devices: more take minutes to start, or do not start.
MAX_CPU_DEVICES = 4096

#: Largest size of a mesh axis.
MAX_AXIS = 1 << 20

#: Most tokens in a row: positions are exact in float32 up to here.
MAX_SEQUENCE = 1 << 24

#: Most seconds of a wait or a limit: 115 days.
MAX_SECONDS = 10_000_000

#: The largest value of each field whose limit is not MAX_INT.
MOST = {
    "run.cpu_devices": MAX_CPU_DEVICES,
    "train.num_tokens": 10**16,
    "train.global_batch_size": 1 << 24,
    "train.micro_batch_size": 1 << 24,
    "data.seq_len": MAX_SEQUENCE,
    "data.prefetch": 1024,
    "data.tokenize_workers": 1024,
    "model.num_layers": 10_000,
    "model.d_model": 1 << 20,
    "model.num_heads": 1 << 16,
    "model.num_kv_heads": 1 << 16,
    "model.head_dim": 1 << 16,
    "model.linear_num_key_heads": 1 << 16,
    "model.linear_num_value_heads": 1 << 16,
    "model.linear_key_head_dim": 1 << 16,
    "model.linear_value_head_dim": 1 << 16,
    "model.mamba_num_heads": 1 << 16,
    "model.mamba_head_dim": 1 << 16,
    "model.mamba_state_size": 1 << 16,
    "model.mamba_num_groups": 1 << 16,
    "model.conv_kernel_size": 1 << 10,
    "model.recurrent_chunk": 1 << 12,
    "model.kv_lora_rank": 1 << 20,
    "model.q_lora_rank": 1 << 20,
    "model.qk_rope_head_dim": 1 << 16,
    "model.v_head_dim": 1 << 16,
    "model.d_ff": 1 << 24,
    "model.dense_d_ff": 1 << 24,
    "model.num_experts": 1 << 16,
    "model.experts_per_token": 1 << 16,
    "model.num_shared_experts": 1 << 16,
    "model.router_groups": 1 << 16,
    "model.router_groups_per_token": 1 << 16,
    "model.mtp_depth": 8,
    "model.vocab_size": 1 << 26,
    **{
        f"parallel.{name}": MAX_AXIS
        for name in "pipeline replica data expert sequence tensor".split()
    },
    "parallel.num_microbatches": 1 << 24,
    "parallel.row_groups": 1 << 16,
    "parallel.virtual_stages": 10_000,
    "diloco.every": 1_000_000,
    "diloco.fragments": 10_000,
    "diloco.overlap": 1_000_000,
    "guard.spike_window": 1_000_000,
    "guard.recent_steps": 1_000_000,
    "cluster.num_processes": MAX_AXIS,
    "cluster.connect_seconds": MAX_SECONDS,
    "cluster.hang_seconds": MAX_SECONDS,
    "cluster.slow_seconds": MAX_SECONDS,
}


def most_of(path: str) -> int:
    """Return the largest value of a field of whole numbers."""
    return MOST.get(path, MAX_INT)


@dataclass(frozen=True)
class Range:
    """The values that an option of whole numbers may have, and one for the fix of an error."""

    least: int
    most: int
    good: int

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most

    def rule(self, value: int) -> str:
        """Return the rule that a value breaks."""
        if value < self.least:
            return f"must be at least {self.least}"
        return f"must be at most {self.most:,}"


#: Ranges that several programs share.
STEP = Range(0, MAX_INT, 1)
DEVICES = Range(1, MAX_CPU_DEVICES, 1)
TOKEN_ID = Range(0, MAX_INT, 0)
REPEATS = Range(1, 100_000, 15)
