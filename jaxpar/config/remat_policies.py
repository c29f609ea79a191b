"""What the backward can find saved, and the named policies of it."""

#: Values that the backward can find saved instead of recomputing, in the order of the forward.
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


#: What a layer is given: saved under every policy, so it is named only to save it on the host.
LAYER_INPUT = "layer_input"


#: After a name: saved in host memory, copied there in the forward and back in the backward.
ON_HOST = ":host"


#: Named policies: which of REMAT_NAMES they save. Fewer names, less memory, more recomputation.
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
    """The names that `parallel.remat` saves, as it writes them."""
    return REMAT_POLICIES.get(remat, tuple(remat.split(",")))


def names_on_host(remat: str) -> tuple[str, ...]:
    """The names that `parallel.remat` saves in host memory, without the mark."""
    return tuple(without_mark(name) for name in saved_names(remat) if name.endswith(ON_HOST))


def without_mark(name: str) -> str:
    """A name of `saved_names`, wherever its value waits."""
    return name.removesuffix(ON_HOST)
