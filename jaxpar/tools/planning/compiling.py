"""Lowers and compiles a layout's train step for GPUs that are not present.

Lowering needs the mesh's axes but no devices, so it works for any number of GPUs on a laptop. Only
cuDNN's attention needs JAX's CUDA plugin, which knows the version of cuDNN and describes devices.
XLA's memory analysis is of the compiled step.

Compiling needs JAX's CUDA plugin, `pip install 'jax[cuda13]'`, but no GPU. Each layout is compiled
in a separate process, since XLA reads its flags only once. Without a GPU, XLA cannot time kernels
and chooses some matmul kernels differently. The memory agreed to 0.1 GiB in the runs compared
(docs/planning.md).
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxpar.config import Config, ConfigError
from jaxpar.config.serialize import from_json, to_json
from jaxpar.kernels.platform import compiling_for
from jaxpar.prediction.communication import Cluster
from jaxpar.prediction.hardware import GPUS, Gpu
from jaxpar.prediction.kernels import SOME_DOCUMENTS, platform_of
from jaxpar.runtime.gpus import xla_flags
from jaxpar.sharding.axes import AXES, BATCH_SPEC
from jaxpar.sharding.batch import Batch, with_abstract_extra
from jaxpar.sharding.mesh import axis_sizes
from jaxpar.step.state import abstract_state, state_shardings
from jaxpar.step.train_step import make_train_step

#: The module of the plugin.
PLUGIN = "jax_plugins.xla_cuda13"

_AUTO = (AxisType.Auto,) * len(AXES)


@functools.cache
def has_plugin() -> bool:
    """Return whether JAX's CUDA plugin is installed."""
    try:
        return importlib.util.find_spec(PLUGIN) is not None
    except ModuleNotFoundError:
        return False


def topology_mesh(cfg: Config, gpu: Gpu, num_gpus: int, per_host: int) -> Mesh:
    """Return the mesh with devices that the plugin describes, for which XLA can compile."""
    import numpy as np
    from jax.experimental import topologies

    per_host = min(per_host, num_gpus)
    shape = f"1x{num_gpus // per_host}x{per_host}"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology=shape
    )
    devices: Any = np.array(topology.devices).reshape(axis_sizes(cfg.parallel))
    return Mesh(devices, AXES, axis_types=_AUTO)


def lower(cfg: Config, gpu: Gpu, mesh: Mesh | AbstractMesh) -> jax.stages.Lowered:
    """Lower the train step on a mesh of GPUs that are not present."""
    sharded: Any = mesh  # JAX's types ask for devices where none are needed
    abstract = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    state = jax.tree.map(abstract, abstract_state(cfg), state_shardings(cfg, sharded))
    rows = (cfg.train.global_batch_size, cfg.data.seq_len)
    ints = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=NamedSharding(sharded, BATCH_SPEC))
    with compiling_for(platform_of(gpu)):
        step: Any = make_train_step(cfg, sharded, SOME_DOCUMENTS)
        traced = step.trace(state, with_abstract_extra(Batch(ints, ints, ints, ints), cfg))
        return traced.lower(lowering_platforms=("cuda",))


def target_config(gpu: Gpu) -> str:
    """Return XLA's target description of a GPU, a text protocol buffer.

    The properties are published ones, or shared by all GPUs of the compute capability.
    """
    major, minor = gpu.compute_capability.split(".")
    capability = f"major: {major} minor: {minor}"
    if int(major) >= 9:  # before Hopper, compilers know no target such as sm_80a
        capability += " feature_extension: ACCELERATED_FEATURES"
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {gpu.multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.memory_peak.value)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {int(gpu.memory.value)}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_interconnect_info {{ active_links: {gpu.links} }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.19.0"
  name: "{gpu.device_kind}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 19 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.device_kind}"
"""


#: GPUs for which compilation without a GPU was compared with the real GPU.
COMPILES_FOR = ("h200", "h100")

#: Largest topology that was tested, in GPUs.
MAX_COMPILED_GPUS = 4096


@dataclass(frozen=True)
class CompiledMemory:
    """XLA's memory_analysis() of a step on one GPU in bytes, and the compile time in seconds."""

    arguments: int
    temporary: int
    seconds: float

    @property
    def total(self) -> int:
        """The peak: state, batch and temporaries."""
        return self.arguments + self.temporary


def check_can_compile(cfg: Config, cluster: Cluster, asked: int = 1) -> None:
    """Check that a config can be compiled for the cluster.

    Raises:   ConfigError without the plugin, for untested GPUs, and for moments in host memory: in
              JAX 0.11, GPUs that are not present have no host memory.
    """
    if cfg.optimizer.offload:
        rule = "cannot be compiled without a GPU: JAX needs the GPU for arrays in host memory"
        fix = "remove --compile, or set --optimizer.offload False"
        raise ConfigError("optimizer.offload", True, rule, fix)
    gpu, count = cluster.gpu, cluster.num_gpus
    if not has_plugin():
        rule = f"needs JAX's CUDA plugin ({PLUGIN}), which is not installed"
        fix = "run pip install 'jax[cuda13]' (no GPU is needed), or remove --compile"
        raise ConfigError("--compile", asked, rule, fix)
    if gpu.name not in COMPILES_FOR:
        rule = f"supports only {' and '.join(COMPILES_FOR)}"
        raise ConfigError(
            "--compile", gpu.name, rule, f"use --gpu {COMPILES_FOR[0]}, or remove --compile"
        )
    if count > MAX_COMPILED_GPUS:
        rule = f"supports at most {MAX_COMPILED_GPUS:,} GPUs"
        raise ConfigError(
            "--compile", count, rule, f"use --gpus {MAX_COMPILED_GPUS}, or remove --compile"
        )


def compile_layout(cfg: Config, cluster: Cluster, timeout: float = 1800) -> CompiledMemory:
    """Compile one layout in a new process.

    Args:     cfg: resolved.
    Raises:   RuntimeError if compilation fails or exceeds the timeout.
    """
    job = {
        "config": json.loads(to_json(cfg)),
        "gpu": cluster.gpu.name,
        "gpus": cluster.num_gpus,
        "per_host": cluster.per_host,
    }
    command = [sys.executable, "-m", "jaxpar.tools.planning.compiling"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(job),
            env=_environment(cfg, cluster.gpu, os.environ),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"compilation did not finish in {timeout:,.0f} s") from None
    if done.returncode:
        raise RuntimeError(
            error_in(done.stderr) or f"the compiler exited with code {done.returncode}"
        )
    return CompiledMemory(**json.loads(done.stdout.splitlines()[-1]))


def error_in(printed: str) -> str:
    """Return the line with the error: JAX prints notes about its own frames after it."""
    lines = [line for line in printed.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines or [""])[-1]


def _environment(cfg: Config, gpu: Gpu, given: Mapping[str, str]) -> dict[str, str]:
    """Return a run's environment: its flags and this process's packages, on the CPU."""
    flags = xla_flags.matching_rows(gpu.device_kind, jax.__version__, cfg)
    if cfg.run.xla_flags == "none":
        flags = []
    settings = " ".join(flag.setting for flag in flags)
    if cfg.run.deterministic:
        settings += f" --{xla_flags.DETERMINISM[0]}=true"
    path = os.pathsep.join(filter(None, sys.path))
    return {**given, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": settings, "PYTHONPATH": path}


def compile_here(job: dict[str, Any]) -> dict[str, Any]:
    """Lower and compile the step in the new process, and return its memory analysis."""
    cfg, gpu = from_json(json.dumps(job["config"])), GPUS[job["gpu"]]
    mesh = topology_mesh(cfg, gpu, job["gpus"], job["per_host"])
    began = time.perf_counter()
    memory: Any = lower(cfg, gpu, mesh).compile().memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    print(json.dumps(compile_here(json.load(sys.stdin))))
