"""Logical axes of weights, and the mesh axes that split them: `sharding/axes.py`, without JAX."""

_FSDP = ("data", "expert", "sequence")

#: Logical axis of a parameter dimension -> mesh axes it is split over.
RULES: dict[str, tuple[str, ...]] = {
    "layer": ("pipeline",),
    "embed": _FSDP,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "whole_mlp": (),
    "experts": ("expert",),
    "spread_experts": ("expert", "tensor"),
    "expert_embed": ("data", "sequence"),
    "router": (),
    "vocab": ("tensor", "pipeline"),
    "head_dim": (),
    "latent": _FSDP,
    "depth": (),
    "norm": (),
    "rank": (),
    "replica": ("replica",),
}
