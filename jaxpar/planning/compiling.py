"""Compiles a layout's train step for GPUs that are not present, to read XLA's memory analysis.

This needs JAX's CUDA plugin, `pip install 'jax[cuda13]'`, but no GPU. Each layout is compiled in a
separate process, since XLA reads its flags only once. Without a GPU, XLA cannot time kernels and
chooses some matmul kernels differently. The memory agreed to 0.1 GiB in the runs compared
(docs/planning.md).
"""

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

from jaxpar.config import Config, ConfigError
from jaxpar.config.serialize import from_json, to_json
from jaxpar.planning.lowering import PLUGIN, has_plugin, lower, topology_mesh
from jaxpar.planning.predict.communication import Cluster
from jaxpar.planning.predict.hardware import GPUS, Gpu
from jaxpar.runtime.gpus import xla_flags

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
    command = [sys.executable, "-m", "jaxpar.planning.compiling"]
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
    memory = lower(cfg, gpu, mesh).compile().memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    print(json.dumps(compile_here(json.load(sys.stdin))))
