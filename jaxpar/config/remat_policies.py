"""Rematerialization policies: the values that they save for the backward pass."""

import typing

from jaxpar.config.schema import ParallelConfig
from jaxpar.config.schema.items import ExpertName, Remat, RematName, RematPolicy

#: Values that can be saved, in forward order, and more of them, of layers with experts.
REMAT_NAMES: tuple[str, ...] = typing.get_args(RematName)
EXPERT_NAMES: tuple[str, ...] = typing.get_args(ExpertName)

#: The input of a layer. Every policy saves it, so it is named only to save it on the host.
LAYER_INPUT = "layer_input"


#: Suffix of a value that is saved in host memory: copied there in the forward pass, and back in
#: the backward pass.
ON_HOST = ":host"


#: The values that each policy saves. Fewer values need less memory and more recomputation.
REMAT_POLICIES: dict[RematPolicy, tuple[str, ...]] = {
    "none": REMAT_NAMES,
    "dots": ("latents", "qkv", "attn_out", "attn_lse", "attn_residual", "gate_up"),
    "dots_offload": (
        "latents",
        *(name + ON_HOST for name in ("qkv", "qk", "attn_out")),
        "attn_lse",
        "attn_residual" + ON_HOST,
        "gate_up",
    ),
    "attn_out": ("attn_out", "attn_lse"),
    "full": (),
    "offload": (LAYER_INPUT + ON_HOST, "attn_out" + ON_HOST, "attn_lse"),
}


def of_layers(p: ParallelConfig, count: int) -> tuple[Remat, ...]:
    """Return the policy of each of `count` layers, those of a stage's chunk."""
    policies = [p.remat] * count
    for one in p.remat_layers:
        for i in range(count)[one.start : one.stop : one.step]:
            policies[i] = one.policy
    return tuple(policies)


def policies(p: ParallelConfig) -> tuple[Remat, ...]:
    """Return every policy that a config names."""
    return p.remat, *(one.policy for one in p.remat_layers)


def saves_on_host(p: ParallelConfig) -> bool:
    """Return whether some layer's policy saves values in host memory."""
    return any(map(names_on_host, policies(p)))


def saved_names(remat: Remat) -> tuple[str, ...]:
    """Return the names that `parallel.remat` saves, with their suffixes."""
    if isinstance(remat, str):
        return REMAT_POLICIES[remat]
    return tuple(one.name + ON_HOST * (one.on == "host") for one in remat)


def names_on_host(remat: Remat) -> tuple[str, ...]:
    """Return the names that `parallel.remat` saves in host memory, without the suffix."""
    return tuple(without_mark(name) for name in saved_names(remat) if name.endswith(ON_HOST))


def without_mark(name: str) -> str:
    """Return a name of `saved_names` without the suffix for host memory."""
    return name.removesuffix(ON_HOST)
