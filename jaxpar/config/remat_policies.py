"""Rematerialization policies: the values that they save for the backward pass."""

#: Values that can be saved for the backward pass instead of recomputed, in forward order.
REMAT_NAMES = (
    "attn_norm",
    "qkv",
    "qk",
    "attn_out",
    "attn_lse",
    "attn_residual",
    "mlp_norm",
    "gate_up",
    "mlp_hidden",
)


#: The input of a layer. Every policy saves it, so it is named only to save it on the host.
LAYER_INPUT = "layer_input"


#: Suffix of a value that is saved in host memory: copied there in the forward pass, and back in
#: the backward pass.
ON_HOST = ":host"


#: The values that each policy saves. Fewer values need less memory and more recomputation.
REMAT_POLICIES: dict[str, tuple[str, ...]] = {
    "none": REMAT_NAMES,
    "dots": ("qkv", "attn_out", "attn_lse", "attn_residual", "gate_up"),
    "dots_offload": (
        *(name + ON_HOST for name in ("qkv", "qk", "attn_out")),
        "attn_lse",
        "attn_residual" + ON_HOST,
        "gate_up",
    ),
    "attn_out": ("attn_out", "attn_lse"),
    "full": (),
    "offload": (LAYER_INPUT + ON_HOST, "attn_out" + ON_HOST, "attn_lse"),
}


def saved_names(remat: str) -> tuple[str, ...]:
    """Return the names that `parallel.remat` saves, with their suffixes."""
    return REMAT_POLICIES.get(remat, tuple(remat.split(",")))


def names_on_host(remat: str) -> tuple[str, ...]:
    """Return the names that `parallel.remat` saves in host memory, without the suffix."""
    return tuple(without_mark(name) for name in saved_names(remat) if name.endswith(ON_HOST))


def without_mark(name: str) -> str:
    """Return a name of `saved_names` without the suffix for host memory."""
    return name.removesuffix(ON_HOST)
