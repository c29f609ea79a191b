"""The parameters of recurrent layers: their specs, and their fused layout.

Key heads are split over TENSOR, and with each the value heads that it serves. The matrices are
FSDP-sharded as those of attention. What is small is not.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxpar.config import ModelConfig
from jaxpar.sharding.params import ParamSpec

type Tree = dict[str, Any]

#: Entries of `fused_weights.LAYER_DIMS`.
FUSED_DIMS: dict[str, int | None] = {
    "delta_in": -2,
    "delta_conv": None,
    "delta_a_log": None,
    "delta_dt_bias": None,
    "delta_norm": None,
    "delta_out": -1,
    "mamba_in": -2,
    "mamba_conv": None,
    "mamba_conv_bias": None,
    "mamba_a_log": None,
    "mamba_dt_bias": None,
    "mamba_d": None,
    "mamba_norm": None,
    "mamba_out": -1,
    "kda_in": -2,
    "kda_gates": -2,
    "kda_conv": None,
    "kda_f_b": -2,
    "kda_g_b": -2,
    "kda_a_log": None,
    "kda_dt_bias": None,
    "kda_norm": None,
    "kda_out": -1,
}

#: Arrays that only recurrent layers have, and the fused ones made of others.
OUTPUTS = ("delta_out", "mamba_out", "kda_out")

#: The matrices after latents. A layer multiplies all of its tokens by them at once, also where the
#: projections of the input are in parts.
AFTER_LATENTS = ("kda_f_b", "kda_g_b")

#: Matrices that `model.matmul_dtype` does not apply to.
IN_COMPUTE_DTYPE = ("kda_gates", *AFTER_LATENTS)

#: The projections of the input, in the order of the fused matrices.
DELTA_PROJECTIONS = ("delta_q", "delta_k", "delta_v", "delta_z", "delta_b", "delta_a")
MAMBA_PROJECTIONS = ("mamba_z", "mamba_x", "mamba_b", "mamba_c", "mamba_dt")
KDA_PROJECTIONS = ("kda_q", "kda_k", "kda_v")
KDA_GATES = ("kda_f_a", "kda_g_a", "kda_b")


def delta_net_specs(
    m: ModelConfig,
    matrix: Callable[..., ParamSpec],
    vector: Callable[..., ParamSpec],
    deep: float,
) -> Tree:
    """Return the specs of Gated DeltaNet's parameters.

    Decays start between those of a rate of 1 and of 16, and time steps between 0.001 and 0.1.

    Args:     matrix, vector: shape and axes of a layer's array, and its distribution -> its spec.
              deep: standard deviation of the matrices that write to the residual stream.
    Source:   Dao & Gu 2024 (2405.21060), for the initial decays and time steps.
    """
    D, H, G = m.d_model, m.linear_num_value_heads, m.linear_num_key_heads
    K, V, width = m.linear_key_head_dim, m.linear_value_head_dim, m.conv_kernel_size
    blocks: Tree = {}
    by_key_head = {"q": K, "k": K, "v": H // G * V, "z": H // G * V, "b": H // G, "a": H // G}
    for name, size in by_key_head.items():
        blocks[f"delta_{name}"] = matrix((D, G, size), ("embed", "heads", "head_dim"), columns=2)
    for name in "qkv":
        shape = G, by_key_head[name], width
        kernel = matrix(shape, ("heads", "head_dim", "head_dim"), width**-0.5, columns=0)
        blocks[f"delta_conv_{name}"] = kernel
    blocks["delta_a_log"] = vector((H,), ("heads",), "decay_rate")
    blocks["delta_dt_bias"] = vector((H,), ("heads",), "time_step")
    blocks["delta_norm"] = vector((V,), ("head_dim",), "ones")
    blocks["delta_out"] = matrix((H, V, D), ("heads", "head_dim", "embed"), deep)
    return blocks


def mamba_specs(
    m: ModelConfig,
    matrix: Callable[..., ParamSpec],
    vector: Callable[..., ParamSpec],
    deep: float,
) -> Tree:
    """Return the specs of Mamba-2's parameters. The arguments are those of `delta_net_specs`.

    Published code calls values x, keys B and queries C.
    """
    D, H, P = m.d_model, m.mamba_num_heads, m.mamba_head_dim
    G, N, width = m.mamba_num_groups, m.mamba_state_size, m.conv_kernel_size
    wide = {"z": (H, P), "x": (H, P), "b": (G, N), "c": (G, N)}
    blocks: Tree = {}
    for name, shape in wide.items():
        blocks[f"mamba_{name}"] = matrix((D, *shape), ("embed", "heads", "head_dim"), columns=2)
    blocks["mamba_dt"] = matrix((D, H), ("embed", "heads"))
    for name in "xbc":
        shape = wide[name]
        axes = ("heads", "head_dim", "head_dim")
        kernel = matrix((*shape, width), axes, width**-0.5, columns=0)
        blocks[f"mamba_conv_{name}"] = kernel
        blocks[f"mamba_bias_{name}"] = vector(shape, ("heads", "head_dim"), "zeros")
    blocks["mamba_a_log"] = vector((H,), ("heads",), "decay_rate")
    blocks["mamba_dt_bias"] = vector((H,), ("heads",), "time_step")
    blocks["mamba_d"] = vector((H,), ("heads",), "ones")
    blocks["mamba_norm"] = vector((H, P), ("heads", "head_dim"), "ones")
    blocks["mamba_out"] = matrix((H, P, D), ("heads", "head_dim", "embed"), deep)
    return blocks


def kda_specs(
    m: ModelConfig,
    matrix: Callable[..., ParamSpec],
    vector: Callable[..., ParamSpec],
    deep: float,
) -> Tree:
    """Return the specs of Kimi Delta Attention's parameters. The arguments are those of
    `delta_net_specs`.

    Decays and output gates are products of two matrices each. The first, to a latent, is complete
    over TENSOR, since all heads read it. The second is FSDP-sharded along the latent.
    """
    D, H, width = m.d_model, m.linear_num_key_heads, m.conv_kernel_size
    K, V = m.linear_key_head_dim, m.linear_value_head_dim
    blocks: Tree = {}
    for name, size in {"q": K, "k": K, "v": V}.items():
        blocks[f"kda_{name}"] = matrix((D, H, size), ("embed", "heads", "head_dim"), columns=2)
        axes = ("heads", "head_dim", "head_dim")
        kernel = matrix((H, size, width), axes, width**-0.5, columns=0)
        blocks[f"kda_conv_{name}"] = kernel
    blocks["kda_b"] = matrix((D, H), ("embed", "heads"))
    for name, size in {"f": K, "g": V}.items():
        blocks[f"kda_{name}_a"] = matrix((D, V), ("embed", "rank"))
        axes = ("latent", "heads", "head_dim")
        blocks[f"kda_{name}_b"] = matrix((V, H, size), axes, columns=2)
    blocks["kda_a_log"] = vector((H,), ("heads",), "decay_rate")
    blocks["kda_dt_bias"] = vector((H, K), ("heads", "head_dim"), "time_step")
    blocks["kda_norm"] = vector((V,), ("head_dim",), "ones")
    blocks["kda_out"] = matrix((H, V, D), ("heads", "head_dim", "embed"), deep)
    return blocks


def fuse(w: Tree, lead: tuple[int, ...]) -> Tree:
    """Return the arrays that the fused layout has in place of others of the same layer.

    Args:     w: one layer's arrays, or stacked ones. lead: their leading dims.
    """
    of_kinds = {"mamba_out": _fuse_mamba, "delta_out": _fuse_delta_net, "kda_out": _fuse_kda}
    return next(of_kind for name, of_kind in of_kinds.items() if name in w)(w, lead)


def _fuse_kda(w: Tree, lead: tuple[int, ...]) -> Tree:
    flat = lambda name, *dims: w[name].reshape(*lead, *dims)  # noqa: E731
    D, width = w["kda_b"].shape[-2], w["kda_conv_q"].shape[-1]
    return {
        "kda_in": jnp.concatenate([flat(n, D, -1) for n in KDA_PROJECTIONS], axis=-1),
        "kda_gates": jnp.concatenate([flat(n, D, -1) for n in KDA_GATES], axis=-1),
        "kda_conv": jnp.concatenate([flat(f"kda_conv_{n}", -1, width) for n in "qkv"], axis=-2),
        "kda_f_b": flat("kda_f_b", w["kda_f_b"].shape[-3], -1),
        "kda_g_b": flat("kda_g_b", w["kda_g_b"].shape[-3], -1),
        "kda_out": flat("kda_out", -1, D),
    }


def _fuse_mamba(w: Tree, lead: tuple[int, ...]) -> Tree:
    flat = lambda name, *dims: w[name].reshape(*lead, *dims)  # noqa: E731
    D, width = w["mamba_dt"].shape[-2], w["mamba_conv_x"].shape[-1]
    columns = [flat(n, D, -1) for n in MAMBA_PROJECTIONS]
    return {
        "mamba_in": jnp.concatenate(columns, axis=-1),
        "mamba_conv": jnp.concatenate([flat(f"mamba_conv_{n}", -1, width) for n in "xbc"], -2),
        "mamba_conv_bias": jnp.concatenate([flat(f"mamba_bias_{n}", -1) for n in "xbc"], -1),
        "mamba_norm": flat("mamba_norm", -1),
        "mamba_out": flat("mamba_out", -1, D),
    }


def _fuse_delta_net(w: Tree, lead: tuple[int, ...]) -> Tree:
    flat = lambda name, *dims: w[name].reshape(*lead, *dims)  # noqa: E731
    D = w["delta_a"].shape[-3]
    kernels = [w[f"delta_conv_{n}"] for n in "qkv"]
    return {
        "delta_in": jnp.concatenate([flat(n, D, -1) for n in DELTA_PROJECTIONS], axis=-1),
        "delta_conv": jnp.concatenate(
            [a.reshape(*lead, -1, a.shape[-1]) for a in kernels], axis=-2
        ),
        "delta_out": flat("delta_out", -1, D),
    }
