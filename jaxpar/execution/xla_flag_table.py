"""XLA flags as data: the GPU, JAX version and `Execution` they are set for, and their gain."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxpar.components.experts import experts_in
from jaxpar.execution.decisions import Execution


def always(ex: Execution) -> bool:
    """Everywhere."""
    return True


def without_tensor(ex: Execution) -> bool:
    """Layers communicate only weights and their gradients."""
    return ex.cfg.parallel.tensor == 1


def fsdp_alone(ex: Execution) -> bool:
    """16-bit layers communicate only weights and their gradients, over data or expert."""
    p = ex.cfg.parallel
    over_data = p.pipeline == p.sequence == 1 and p.data * p.expert > 1
    return over_data and gathers_of_16_bits(ex) and ex.cfg.compute.matmul_dtype == "compute"


def with_tensor(ex: Execution) -> bool:
    """Layers communicate activations."""
    return not without_tensor(ex)


def gathers_of_16_bits(ex: Execution) -> bool:
    """Layers communicate only weights and their gradients, and gather in the compute dtype."""
    return without_tensor(ex) and ex.cfg.parallel.gather_dtype == "compute"


def gathers_of_8_bits(ex: Execution) -> bool:
    """Layers communicate only weights and their gradients, and gather in 8 bits."""
    return without_tensor(ex) and ex.cfg.parallel.gather_dtype == "float8"


def scatters_of_16_bits(ex: Execution) -> bool:
    """Layers communicate only weights and their gradients, and sum gradients in bfloat16."""
    return without_tensor(ex) and ex.cfg.parallel.grad_reduce == "bfloat16"


def with_permutes(ex: Execution) -> bool:
    """Layers send activations, or keys and values, by permutes."""
    # Pipelines send activations by all-to-alls.
    p = ex.cfg.parallel
    over_tensor = p.tensor > 1 and p.pipeline == 1
    return over_tensor or (p.sequence > 1 and p.context != "ulysses")


def with_experts_apart(ex: Execution) -> bool:
    """Layers send tokens to their experts by permutes, and nothing else by permutes."""
    # Pipelines send them by all-to-alls.
    p = ex.cfg.parallel
    apart = p.expert > 1 and p.pipeline == 1 and bool(experts_in(ex.cfg.model))
    return apart and not with_permutes(ex)


def in_row_groups(ex: Execution) -> bool:
    """One row group communicates while another computes."""
    return ex.row_groups_overlap


def in_float8(ex: Execution) -> bool:
    """8-bit matmuls."""
    return ex.cfg.compute.matmul_dtype == "float8"


def wide_and_whole(ex: Execution) -> bool:
    """16-bit matmuls at least as wide as those of 8B, on unsplit sequences."""
    p, m = ex.cfg.parallel, ex.cfg.model
    return p.tensor == p.sequence == 1 and m.d_model >= 4096 and not in_float8(ex)


def wide_in_stages(ex: Execution) -> bool:
    """16-bit matmuls at least as wide as those of 8B, split over tensor, in pipeline stages."""
    p, m = ex.cfg.parallel, ex.cfg.model
    stages = p.tensor > 1 and p.pipeline > 1 and p.sequence == 1
    return stages and m.d_model >= 4096 and not in_float8(ex)


def with_host_copies(ex: Execution) -> bool:
    """Some activations are in host memory between a layer's forward and backward."""
    return ex.activations_on_host


#: Gain of the flags of `FSDP_ON_H100S`, which were measured together.
TOGETHER = (
    "the flags for FSDP on several H100s together: 252.9 to 240.4 ms per step, 8 layers of 8B on 2 "
    "GPUs; 232.5 to 220.0 ms, 6 layers of Qwen3-30B-A3B"
)

#: The XLA flag that names a file of tuned kernels. Paths are relative to PACKAGE.
TABLE = "xla_gpu_load_autotune_results_from"


PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One XLA flag, with the conditions under which it is set and the reason."""

    name: str
    value: str
    gain: str
    """Measurements without the flag and with it. Conditions: docs/experiments.md."""
    where: Callable[[Execution], bool] = always
    gpus: tuple[str, ...] = ("H200",)
    """Substrings of the names of the GPUs on which the flag was measured."""
    jax: str = "0.11."
    """Prefix of the JAX versions that support the flag."""
    one_process: bool = False
    """XLA rejects or ignores the flag in runs of several processes."""

    @property
    def setting(self) -> str:
        """The flag as written in XLA_FLAGS. A table's path is quoted, since it may have spaces."""
        value = shlex.quote(str(PACKAGE / self.value)) if self.name == TABLE else self.value
        return f"--{self.name}={value}"


FSDP_ON_H100S = tuple(
    Flag(name=name, value=value, gain=TOGETHER, where=fsdp_alone, gpus=("H100",))
    for name, value in (
        ("xla_gpu_enable_latency_hiding_scheduler", "true"),
        ("xla_gpu_all_gather_combine_threshold_bytes", str(512 << 20)),
        ("xla_gpu_experimental_collective_start_as_early_as_possible", "true"),
        ("xla_gpu_experimental_parallel_collective_overlap_limit", "6"),
        ("xla_gpu_enable_analytical_sol_latency_estimator", "false"),
        ("xla_gpu_use_memcpy_local_p2p", "true"),
    )
)

FLAGS = (
    Flag(
        name="xla_gpu_enable_latency_hiding_scheduler",
        value="true",
        gain="collectives overlap matmuls: 9,768 to 9,975 tokens/s/GPU together with unrolled "
        "layers, 8B on 8 GPUs",
    ),
    Flag(
        name="xla_gpu_all_gather_combine_threshold_bytes",
        value=str(512 << 20),
        gain="one gather per layer: 10,222 to 10,481 tokens/s/GPU, 8B on 8 GPUs, with the same "
        "threshold for scatters",
        where=gathers_of_16_bits,
    ),
    Flag(
        name="xla_gpu_all_gather_combine_threshold_bytes",
        value=str(256 << 20),
        gain="one gather per layer for 8-bit weights: 512 MiB would combine two layers",
        where=gathers_of_8_bits,
    ),
    Flag(
        name="xla_gpu_reduce_scatter_combine_threshold_bytes",
        value=str(128 << 20),
        gain="one scatter per layer instead of one per four: peak memory 72.5 to 70.7 GiB together "
        "with another change, 8B on 8 GPUs",
        where=scatters_of_16_bits,
    ),
    Flag(
        name="xla_gpu_all_gather_combine_threshold_bytes",
        value="0",
        gain="no row group waits for another: 9,491 to 9,846 tokens/s/GPU together with the next "
        "flag and row groups, 8B on 4 GPUs, tensor 2",
        where=in_row_groups,
    ),
    Flag(
        name="xla_gpu_reduce_scatter_combine_threshold_bytes",
        value="0",
        gain="together with the previous flag: 9,491 to 9,846 tokens/s/GPU",
        where=in_row_groups,
    ),
    Flag(
        name="xla_gpu_experimental_collective_start_as_early_as_possible",
        value="true",
        gain="exposed communication 61.5 to 30.6 ms per step, together with gathers one layer "
        "ahead and a limit of 4 in the next flag, 8B on 4 GPUs",
        where=without_tensor,
    ),
    Flag(
        name="xla_gpu_experimental_parallel_collective_overlap_limit",
        value="6",
        gain="with a limit of 4, a layer's gather waits for its scatters: exposed communication 52 "
        "to 18 ms, 1,520 to 1,507 ms per step, 8B on 4 GPUs",
        where=without_tensor,
    ),
    Flag(
        name="xla_gpu_experimental_parallel_collective_overlap_limit",
        value="4",
        gain="4 takes 1,581 ms per step and 6 takes 1,587, 8B on 4 GPUs, tensor 2; 1, the default, "
        "was not timed",
        where=with_tensor,
    ),
    Flag(
        name="xla_gpu_enable_analytical_sol_latency_estimator",
        value="false",
        gain="XLA's simpler cost model: exposed communication 30.6 to 23.6 ms per step, 8B on 4 "
        "GPUs",
        where=without_tensor,
    ),
    Flag(
        name="xla_gpu_experimental_parallel_async_compute_limit",
        value="16",
        gain="all of a layer's host copies overlap its computation, instead of two at a time: "
        "their cost falls from 6.5% to 0.1%, 8B on 2 GPUs",
        where=with_host_copies,
    ),
    Flag(
        name="xla_gpu_collective_permute_mode",
        value="peer",
        gain="copy engines instead of NCCL kernels: 33,534 to 35,193 tokens/s/GPU, 8 layers of 8B "
        "on 4 GPUs, tensor 2; 18,498 to 18,587 with sequence 2",
        where=with_permutes,
        one_process=True,
    ),
    Flag(
        name="xla_gpu_collective_permute_mode",
        value="peer",
        gain="the same for the tokens of experts: 212.8 to 210.0 ms per step, 6 layers of "
        "Qwen3-30B-A3B on 2 H100s, expert 2, by a prototype; on H200s not compared",
        where=with_experts_apart,
        gpus=("H100", "H200"),
        one_process=True,
    ),
    Flag(
        name="xla_gpu_enable_command_buffer",
        value="+CONDITIONAL,+WHILE",
        gain="loops of further rounds are part of CUDA graphs: 321.7 to 319.6 ms per step; the "
        "host is late for 21.3 to 0 ms of a profiled one, 12 layers of Qwen3-30B-A3B on 4 GPUs, "
        "expert 4",
        where=with_experts_apart,
    ),
    Flag(
        name="xla_gpu_graph_min_graph_size",
        value="1",
        gain="the same for a loop alone between two sends: without it the host is late for 10.2 of "
        "312 ms, 12 layers on 4 GPUs; with it for 0 of 174, 6 layers on 2 GPUs",
        where=with_experts_apart,
    ),
    Flag(
        name="xla_gpu_use_memcpy_local_p2p",
        value="true",
        gain="copy engines for all-to-alls: 459.8 to 456.7 ms per step, 8 layers of 8B on 4 GPUs, "
        "FSDP",
    ),
    Flag(
        name="xla_gpu_enable_triton_gemm",
        value="false",
        gain="compilation takes 13 s (8 layers); tuning Triton's 8-bit matmuls took over 90 s",
        where=in_float8,
    ),
    Flag(
        name="xla_gpu_enable_triton_gemm",
        value="false",
        gain="1,516 to 1,500 ms per step, 8B on 2 GPUs, FSDP, and 6,192 to 6,169 with pipeline 2: "
        "cuBLAS also fuses the addition that follows; 1.4% slower at D = 2,048",
        where=wide_and_whole,
    ),
    Flag(
        name="xla_gpu_enable_triton_gemm",
        value="false",
        gain="cuBLAS accumulates all of a layer's gradients in place, Triton half of them. No "
        "effect by itself: 423.8 and 422.7 ms per step, 16 layers of 8B on 2 GPUs, tensor 2",
        where=wide_in_stages,
    ),
    Flag(
        name=TABLE,
        value="execution/tuned/nvidia_h200.textproto",
        gain="matmul kernels chosen at the power limit (`matmul_table.py`): 483.4 to 476.3 ms "
        "per step, 1.5B on one GPU; 427.7 to 424.4, 8 layers of 8B",
    ),
    Flag(
        name=TABLE,
        value="execution/tuned/nvidia_h100.textproto",
        gain="the same on an H100: 1.5B compiles in 7.5 s instead of 23.0; 489.7 to 487.5 ms per "
        "step on one GPU",
        gpus=("H100",),
    ),
    *FSDP_ON_H100S,
)


#: Environment variables set together with the flags on every NVIDIA GPU, unless the user set them.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


#: Environment variables set even if the flags are turned off.
ALWAYS = {"NCCL_NVLS_ENABLE": "0"}
