"""Lowers a layout's train step for GPUs that are not present.

Lowering needs the mesh's axes but no devices, so it works for any number of GPUs on a laptop. Only
cuDNN's attention needs JAX's CUDA plugin, which knows the version of cuDNN and describes devices.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxpar.config import Config
from jaxpar.kernels.platform import compiling_for
from jaxpar.planning.predict.hardware import Gpu
from jaxpar.planning.predict.kernels import SOME_DOCUMENTS, platform_of
from jaxpar.sharding.axes import AXES, BATCH_SPEC
from jaxpar.sharding.batch import Batch
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
    scores = ints.update(dtype=jnp.float32) if cfg.dpo.beta else None
    with compiling_for(platform_of(gpu)):
        step: Any = make_train_step(cfg, sharded, SOME_DOCUMENTS)
        traced = step.trace(state, Batch(ints, ints, ints, ints, scores))
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
