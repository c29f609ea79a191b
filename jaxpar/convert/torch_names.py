"""The names of all parameters in files of `to-torch`, which `torch_model` loads."""

from jaxpar.components.attention import Attention
from jaxpar.config import ModelConfig
from jaxpar.config.layout.composition import model_of
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.names import Name, Names, Stored, unnamed

_NORMS = {f"{n}_norm": f"{n}_norm.weight" for n in ("attn", "mlp")}
_NORMS |= {f"{n}_norm_bias": f"{n}_norm.bias" for n in ("attn", "mlp")}
_NORMS |= {f"{n}_post_norm": f"{n}_post_norm.weight" for n in ("attn", "mlp")}
_MIXERS: dict[str, Name] = {
    **{f"w{n}": f"{n}.weight" for n in (*"qkvo", "q_a", "q_b", "kv_a", "kv_b")},
    **{f"b{n}": f"{n}.bias" for n in "qkvo"},
    **{f"{n}_norm": f"{n}_norm.weight" for n in ("q", "k", "q_a", "kv_a")},
    "sinks": "sinks",
    "w_attn_gate": "gate.weight",
    **{f"delta_{n}": f"{n}.weight" for n in "qkvzba"},
    **{f"delta_conv_{n}": f"conv_{n}.weight" for n in "qkv"},
    "delta_out": "o.weight",
    **{f"mamba_{n}": f"{n}.weight" for n in ("z", "x", "b", "c", "dt")},
    **{f"mamba_conv_{n}": f"conv_{n}.weight" for n in "xbc"},
    **{f"mamba_bias_{n}": f"conv_{n}.bias" for n in "xbc"},
    "mamba_d": "d",
    "mamba_out": "o.weight",
    **{f"kda_{n}": f"{n}.weight" for n in (*"qkvb", "f_a", "f_b", "g_a", "g_b")},
    **{f"kda_conv_{n}": f"conv_{n}.weight" for n in "qkv"},
    "kda_out": "o.weight",
    **{f"{of}_{n}": n for of in ("delta", "mamba", "kda") for n in ("a_log", "dt_bias", "norm")},
}
_PARTS = ("gate", "up", "down")
_MLP = {f"w_{n}": f"mlp.{n}.weight" for n in _PARTS} | {f"b_{n}": f"mlp.{n}.bias" for n in _PARTS}
_EXPERTS: dict[str, Name] = {
    "router": "mlp.router.weight",
    "b_router": "mlp.router.bias",
    "router_bias": "mlp.router_bias",
    **{f"w_shared_{n}": f"mlp.shared.{n}.weight" for n in _PARTS},
    "w_shared_router": Stored("mlp.shared_gate.weight", "1 a"),
    **{f"w_{n}": f"mlp.experts.{{E}}.{n}.weight" for n in _PARTS},
    **{f"b_{n}": f"mlp.experts.{{E}}.{n}.bias" for n in _PARTS},
}

NAMES = Names(
    top={
        "embed": "embed.weight",
        "final_norm": "norm.weight",
        "final_norm_bias": "norm.bias",
        "positions": "positions.weight",
        "head": "head.weight",
    },
    layer="layers.{L}.",
    weights=_NORMS | _MIXERS | _MLP | {"layer_scale": "layer_scale"},
    experts=_EXPERTS,
)

#: Models leave out the modules of multi-token prediction, which only training computes.
PLAIN = Family(model_type="plain", architecture="Decoder", names=NAMES, fields={}, defaults={})


def why_not(m: ModelConfig) -> str | None:
    """Return why a model has no such file; None if it has one."""
    mixers = [layer.mixer for layer in model_of(m).layers]
    of_users = [a.function for a in mixers if isinstance(a, Attention) and a.function != "softmax"]
    if of_users:
        return f"model.attention = {of_users[0]}, which is your own"
    missing = [path for path in unnamed(NAMES, m) if not path.startswith("mtp/")]
    return f"no name for {', '.join(missing)}" if missing else None
