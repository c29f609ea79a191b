"""The private names of JAX that the package uses, and why no public one does.

A module is loaded when it is used: the launcher imports no JAX.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrivateModule:
    """A module of JAX with private names.

    module   Its name.
    names    What the package uses of it, dotted.
    use      What stands on it.
    reason   Why no public name does.
    """

    module: str
    names: tuple[str, ...]
    use: str
    reason: str

    def load(self) -> Any:
        """Import the module.

        Raises:   ImportError naming what this JAX lacks, and what stands on it.
        """
        return _loaded(self)


@functools.cache
def _loaded(private: PrivateModule) -> Any:
    try:
        module = importlib.import_module(private.module)
        missing = [name for name in private.names if not _has(module, name)]
    except ModuleNotFoundError:
        module, missing = None, list(private.names)
    if not missing:
        return module
    import jax

    raise ImportError(
        f"JAX {jax.__version__} has no {', '.join(missing)} in {private.module}, on which stands:"
        f" {private.use}. Fix: install the JAX that pyproject.toml names"
    )


def _has(module: Any, name: str) -> bool:
    try:
        functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        return False
    return True


CUDNN_ATTENTION = PrivateModule(
    "jax._src.cudnn.fused_attention_stablehlo",
    (
        "check_cudnn_version",
        "_dot_product_attention_fwd_p_wrapper.bind",
        "_dot_product_attention_bwd_p_wrapper.bind",
        "MaskType.CAUSAL",
        "MaskType.PADDING_CAUSAL",
        "AttentionLayout.BTNH",
    ),
    "attention by cuDNN",
    "jax.nn.dot_product_attention rounds the log-sum-exp to bfloat16 and drops its cotangent",
)
DISTRIBUTED = PrivateModule(
    "jax._src.distributed",
    (
        "global_state.client",
        "global_state.num_processes",
        "global_state.process_id",
        "global_state.preemption_sync_manager",
        "_jax.get_distributed_runtime_service",
    ),
    "messages between the processes of a run, preemption, and the launcher's coordination service",
    "jax.distributed offers neither the key-value store nor a service that runs elsewhere",
)
SERVICE = PrivateModule(
    "jaxlib._jax",
    ("get_distributed_runtime_client", "get_distributed_runtime_service"),
    "the launcher's messages between hosts, and its coordination service",
    "jax.distributed.initialize alone starts them, in a process that computes",
)
CPU_CLIENT = PrivateModule(
    "jax._src.xla_bridge",
    ("make_cpu_client",),
    "the address of Gloo, for CPU devices in several processes",
    "jax.extend.backend registers a backend, but makes none with collectives of one's own",
)
GLOO = PrivateModule(
    "jaxlib._jax",
    ("make_gloo_tcp_collectives",),
    "the address of Gloo, for CPU devices in several processes",
    "JAX passes neither a host name nor an interface to Gloo",
)
CUDA_VERSIONS = PrivateModule(
    "jax._src.lib",
    ("cuda_versions",),
    "the versions of CUDA's libraries in `doctor`, on cards, and where cuDNN's are told apart",
    "JAX tells the versions that it has loaded nowhere else",
)
CONFIG = PrivateModule(
    "jax._src.config",
    ("pallas_tpu_interpret_mode_context_manager.value",),
    "the softmax over logits in the logits' place, in Pallas' interpreter",
    "only `plgpu.kernel` reads whether kernels are interpreted, and it overwrites no operand",
)
MPMD = PrivateModule(
    "jax._src.pallas.mpmd",
    ("_mpmd_map",),
    "the softmax over logits in the logits' place, by Mosaic GPU",
    "`plgpu.kernel` overwrites references alone, and refuses those that vary over a mesh",
)

HLO = PrivateModule(
    "jaxlib._hlo",
    ("HloModule.from_serialized_hlo_module_proto", "HloModule.to_string"),
    "the programs of a trace in words, for the sums by part of the model",
    "jax.profiler.ProfileData has no programs, and jax.extend writes only those that it lowered",
)

#: All of them.
TABLE = (
    *(CUDNN_ATTENTION, DISTRIBUTED, SERVICE, CPU_CLIENT, GLOO, CUDA_VERSIONS),
    *(CONFIG, MPMD, HLO),
)
