"""XLA flags as data: which are set, for which GPU, JAX version and `Execution`, and their gain."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxpar.execution.decisions import Execution


def always(ex: Execution) -> bool:
    """Every mesh, a single device included."""
    return True


def without_tensor(ex: Execution) -> bool:
    """Layers communicate only for their weights."""
    return ex.cfg.parallel.tensor == 1


def with_tensor(ex: Execution) -> bool:
    """Layers communicate for their activations."""
    return not without_tensor(ex)


def gathers_of_16_bits(ex: Execution) -> bool:
    """Layers communicate only for their weights, which travel in the compute dtype."""
    return without_tensor(ex) and ex.cfg.parallel.gather_dtype == "compute"


def gathers_of_8_bits(ex: Execution) -> bool:
    """Layers communicate only for their weights, which travel in 8 bits."""
    return without_tensor(ex) and ex.cfg.parallel.gather_dtype == "float8"


def scatters_of_16_bits(ex: Execution) -> bool:
    """Layers communicate only for their weights, whose gradients are summed in bfloat16 (float32
    gradients travel by all-to-all)."""
    return without_tensor(ex) and ex.cfg.parallel.grad_reduce == "bfloat16"


def with_permutes(ex: Execution) -> bool:
    """Layers send activations, or keys and values, by permutes (in a pipeline, activations travel
    by all-to-all)."""
    p = ex.cfg.parallel
    over_tensor = p.tensor > 1 and p.pipeline == 1
    return over_tensor or (p.sequence > 1 and p.context != "ulysses")


def in_row_groups(ex: Execution) -> bool:
    """One group of rows communicates while another computes."""
    return ex.row_groups_overlap


def in_float8(ex: Execution) -> bool:
    """8-bit matmuls."""
    return ex.cfg.model.matmul_dtype == "float8"


def wide_and_whole(ex: Execution) -> bool:
    """16-bit matmuls at least as wide as those of 8B, over complete sequences."""
    p, m = ex.cfg.parallel, ex.cfg.model
    return p.tensor == p.sequence == 1 and m.d_model >= 4096 and not in_float8(ex)


def wide_in_stages(ex: Execution) -> bool:
    """16-bit matmuls at least as wide as those of 8B, split over tensor, in pipeline stages."""
    p, m = ex.cfg.parallel, ex.cfg.model
    stages = p.tensor > 1 and p.pipeline > 1 and p.sequence == 1
    return stages and m.d_model >= 4096 and not in_float8(ex)


def with_host_copies(ex: Execution) -> bool:
    """Activations wait in host memory between a layer's forward and backward."""
    return ex.activations_on_host


#: The flag of XLA that names a table of tuned kernels, and the folder below which ours are.
TABLE = "xla_gpu_load_autotune_results_from"


PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One XLA flag, where it is set, and why."""

    name: str
    value: str
    gain: str
    """What was measured with it, and without. docs/experiments/README.md has the conditions."""
    where: Callable[[Execution], bool] = always
    gpus: tuple[str, ...] = ("H200",)
    """Parts of the names of the GPUs that it was measured on."""
    jax: str = "0.11."
    """How the versions of JAX begin that know it."""
    one_process: bool = False
    """XLA refuses it, or it does nothing, in a run of several processes."""

    @property
    def setting(self) -> str:
        """As in XLA_FLAGS. A table is a file of this package, whose path may have spaces."""
        value = shlex.quote(str(PACKAGE / self.value)) if self.name == TABLE else self.value
        return f"--{self.name}={value}"


FLAGS = (
    Flag(
        name="xla_gpu_enable_latency_hiding_scheduler",
        value="true",
        gain="collectives run beside matmuls: with it, unrolled layers gave 9,975 tokens/s/GPU, a "
        "loop over pairs of layers without it 9,768, 8B on 8 GPUs; not measured apart",
    ),
    Flag(
        name="xla_gpu_all_gather_combine_threshold_bytes",
        value=str(512 << 20),
        gain="one gather per layer: 10,222 to 10,481 tokens/s/GPU, 8B on 8 GPUs, with as much for "
        "scatters",
        where=gathers_of_16_bits,
    ),
    Flag(
        name="xla_gpu_all_gather_combine_threshold_bytes",
        value=str(256 << 20),
        gain="as the one before, for weights of 8 bits: 512 MiB puts two layers into one gather",
        where=gathers_of_8_bits,
    ),
    Flag(
        name="xla_gpu_reduce_scatter_combine_threshold_bytes",
        value=str(128 << 20),
        gain="one scatter per layer in place of one per four: peak 72.5 to 70.7 GiB with another "
        "change, as fast, 8B on 8 GPUs",
        where=scatters_of_16_bits,
    ),
    Flag(
        name="xla_gpu_all_gather_combine_threshold_bytes",
        value="0",
        gain="no group's gather waits for another's: 9,491 to 9,846 with the next flag and groups",
        where=in_row_groups,
    ),
    Flag(
        name="xla_gpu_reduce_scatter_combine_threshold_bytes",
        value="0",
        gain="with the last flag and groups, 9,491 to 9,846 tokens/s/GPU, 8B on 4 GPUs, tensor 2",
        where=in_row_groups,
    ),
    Flag(
        name="xla_gpu_experimental_collective_start_as_early_as_possible",
        value="true",
        gain="with gathers a layer ahead and a limit of 4 for the next, exposed communication of "
        "8B on 4 GPUs from 61.5 to 30.6 ms a step",
        where=without_tensor,
    ),
    Flag(
        name="xla_gpu_experimental_parallel_collective_overlap_limit",
        value="6",
        gain="with 4 a layer's gather waits for its scatters: exposed communication of 8B on 4 "
        "GPUs from 52 to 18 ms, 1,520 to 1,507 ms a step",
        where=without_tensor,
    ),
    Flag(
        name="xla_gpu_experimental_parallel_collective_overlap_limit",
        value="4",
        gain="6 gave 1,587 ms a step where 4 gave 1,581, 8B on 4 GPUs, tensor 2; with the default, "
        "1, which was not timed, a collective is begun once the one before has ended",
        where=with_tensor,
    ),
    Flag(
        name="xla_gpu_enable_analytical_sol_latency_estimator",
        value="false",
        gain="XLA's plainer model of costs: exposed communication of 8B on 4 GPUs from 30.6 to "
        "23.6 ms a step",
        where=without_tensor,
    ),
    Flag(
        name="xla_gpu_experimental_parallel_async_compute_limit",
        value="16",
        gain="all of a layer's copies to or from the host at once, in place of two, beside its "
        "computation: 6.5% slower than without copies before, 0.1% after, 8B on 2 GPUs",
        where=with_host_copies,
    ),
    Flag(
        name="xla_gpu_collective_permute_mode",
        value="peer",
        gain="copy engines in place of NCCL's kernels, in one process: 33,534 to 35,193 "
        "tokens/s/GPU, 8 layers of 8B on 4 GPUs, tensor 2; 18,498 to 18,587 with sequence 2",
        where=with_permutes,
        one_process=True,
    ),
    Flag(
        name="xla_gpu_use_memcpy_local_p2p",
        value="true",
        gain="the same for all-to-alls: 459.8 to 456.7 ms a step, 8 layers of 8B on 4 GPUs, FSDP",
    ),
    Flag(
        name="xla_gpu_enable_triton_gemm",
        value="false",
        gain="compilation in 13 s (8 layers), where tuning Triton's 8-bit matmuls took over 90 s",
        where=in_float8,
    ),
    Flag(
        name="xla_gpu_enable_triton_gemm",
        value="false",
        gain="1,516 to 1,500 ms a step, 8B on 2 GPUs, FSDP, and 6,192 to 6,169, pipeline 2: cuBLAS "
        "also adds what comes next; with D = 2,048 it is 1.4% slower",
        where=wide_and_whole,
    ),
    Flag(
        name="xla_gpu_enable_triton_gemm",
        value="false",
        gain="cuBLAS adds all of a layer's gradients up in place, by XLA's plan; with Triton half "
        "of them take passes of their own. Alone it changes nothing: 423.8 and 422.7 ms a step, 16 "
        "layers of 8B on 2 GPUs, tensor 2, row groups 2",
        where=wide_in_stages,
    ),
    Flag(
        name=TABLE,
        value="execution/tuned/nvidia_h200.textproto",
        gain="matmul kernels chosen at the power limit (`jaxpar.bench matmuls`): 483.4 to 476.3 ms "
        "a step, 1.5B on one GPU; 427.7 to 424.4, 8 layers of 8B",
    ),
)


#: Environment that belongs with them, on every NVIDIA GPU; a value the user has set stays.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


#: The same, whether our flags are wanted or not.
ALWAYS = {"NCCL_NVLS_ENABLE": "0"}
