"""Configs of further kinds of models, objectives and programs, by name, as in `programs.py`."""

import dataclasses

from jaxpar.config import (
    Attention,
    ClampedSwiglu,
    Experts,
    GatedDeltaNet,
    Glu,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    Mamba2,
    Mlp,
    QkNorm,
    QueryGrowth,
    Rope,
    RopeScaling,
    Router,
)
from tests.step.programs import (
    ATTENTION,
    CPU,
    EXPERTS,
    F8,
    FOUR_EXPERTS,
    GLU,
    LORA,
    ROUTED,
    ROUTER,
    WIDE_ATTENTION,
    WIDE_GLU,
    WINDOWS,
    axes,
)


def _with(component, **fields):
    """A component, or a layer, with some fields changed."""
    return dataclasses.replace(component, **fields)


_YARN = RopeScaling(kind="yarn", original_max_position=32, mscale_all_dim=1.0, attention_factor=1.0)
_LITE = LatentAttention(
    num_heads=8,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    kv_lora_rank=32,
    rope=Rope(layout="interleaved", scaling=_YARN),
)
_LATENT = _with(_LITE, q_lora_rank=48)

#: DeepSeek-V3's attention, and DeepSeek-V2-Lite's, whose queries have no latent.
LATENT = {"model.layers.mixer": _LATENT}
LATENT_LITE = {"model.layers.mixer": _LITE}
_DENSE = Layer("dense_layers", _LATENT, Glu(96))
DEEPSEEK = {"model.layers": [_DENSE, *[Layer("layers", _LATENT, ROUTED)] * 2]} | ROUTER
MTP = {"model.mtp_depth": 2, "train.mtp_loss": 0.3}

#: Layers of several kinds: Qwen3-Next's, Nemotron-H's and Nemotron 3's, Kimi Linear's.
_DELTA = GatedDeltaNet(
    num_key_heads=4, num_value_heads=8, key_head_dim=16, value_head_dim=16, chunk=16
)
_HALF = Rope(fraction=0.5)
_GATED = _with(ATTENTION, rope=_HALF, gate=True)
DELTA_NET = {"model.layers": [Layer("delta_layers", _DELTA, GLU), Layer("layers", _GATED, GLU)]}
_NORM_OF_ALL = _with(ATTENTION, rope=_HALF, qk_norm=QkNorm(over="all"))
OLMO_HYBRID = {
    "model.layers": [
        *[Layer("delta_layers", _with(_DELTA, allow_neg_eigval=True), GLU)] * 2,
        Layer("layers", _NORM_OF_ALL, GLU, norms="after"),
    ]
}
_KDA = KimiDeltaAttention(num_heads=8, key_head_dim=16, value_head_dim=16, chunk=16)
_OF_KDA = _with(ROUTED, router=Router(score="sigmoid", balancing_bias=True))
KDA = {
    "model.layers": [
        Layer("kda_dense_layers", _KDA, Glu(96)),
        Layer("kda_layers", _KDA, _OF_KDA),
        Layer("layers", _with(_LITE, rope=None), _OF_KDA),
    ]
}


def _mamba(mixer: Mamba2, attention: Attention, d_ff: int) -> list[Layer]:
    """A mixer or a feed-forward a layer."""
    mlp = Layer("mlp_layers", None, Mlp(d_ff, activation="relu_squared"))
    attends = Layer("layers", _with(attention, rope=None), None)
    return [Layer("mamba_layers", mixer, None), mlp, attends, mlp]


_SSM = Mamba2(num_heads=8, head_dim=16, state_size=16, num_groups=4, min_step=0.02, chunk=16)
MAMBA = {"model.layers": _mamba(_SSM, ATTENTION, 128)}
_WITH_MLP, _MLP, _ATTENDS, _ = _mamba(_SSM, ATTENTION, 96)
_SPARSE = _with(_OF_KDA, expert=Mlp(128, activation="relu_squared"), num_shared_experts=2)
_MOE = Layer("moe_layers", None, _SPARSE)
NEMOTRON_3 = {"model.layers": [_WITH_MLP, _MOE, _ATTENDS, _MOE, _MLP]}

#: Gemma 4's global layers, Llama 4's chunks, gpt-oss's sinks, GPT-3's and GPT-J's blocks, Granite.
_NORMED = _with(ATTENTION, qk_norm=QkNorm(), value_norm=True)
_WINDOW = _with(_NORMED, window=16, rope=Rope(theta=1e4))
_GLOBAL = _with(_NORMED, head_dim=32, num_kv_heads=2, keys_as_values=True)
GLOBAL = {
    "model.layers": [
        Layer("layers", _WINDOW, GLU, norms="around", scaled=True),
        Layer("global_layers", _GLOBAL, GLU, norms="around", scaled=True),
    ]
}
_PLAIN_NORM = _with(ATTENTION, qk_norm=QkNorm(gain=False))
_ONE_EXPERT = Experts(
    expert=GLU,
    num_experts=4,
    experts_per_token=1,
    router=Router(score="sigmoid", normalize=False, scales_input=True),
    num_shared_experts=1,
)
_GROWN = _with(_PLAIN_NORM, rope=None, growth=QueryGrowth(beta=0.3, span=4))
LLAMA_4 = {
    "model.layers": [
        Layer("dense_layers", _with(_PLAIN_NORM, chunk=16), GLU),
        Layer("layers", _GROWN, _ONE_EXPERT),
    ]
}
_SINKS = _with(ATTENTION, bias=True, out_bias=True, sinks=True)
_CLAMPED = _with(
    FOUR_EXPERTS,
    expert=Glu(128, activation=ClampedSwiglu(), bias=True),
    router=Router(linear_bias=True),
)
GPT_OSS = {
    "model.layers": [
        Layer("local", _with(_SINKS, window=16), _CLAMPED),
        Layer("layers", _SINKS, _CLAMPED),
    ]
}
_BIASED = _with(ATTENTION, rope=None, bias=True, out_bias=True)
GPT_3 = {
    "model.norm.kind": "layer",
    "model.max_positions": 64,
    "model.layers": [Layer("layers", _BIASED, Mlp(128, activation="gelu", bias=True))] * 2,
}
_GPT_J = Layer(
    "layers",
    _with(ATTENTION, rope=_HALF),
    Mlp(128, activation="gelu_exact", bias=True),
    parallel="one_norm",
)
GPT_J = {"model.norm.kind": "layer", "model.layers": [_GPT_J] * 2}
GRANITE = {
    "model.embedding_multiplier": 12.0,
    "model.residual_multiplier": 0.2,
    "model.logits_scaling": 8.0,
    "model.layers.mixer.scale": 0.01,
}
SOFTCAPS = {"model.layers.mixer.softcap": 50.0, "model.logits_softcap": 30.0}

DPO = {"dpo.beta": 0.1, "dpo.label_smoothing": 0.1}
DISTILL = {"distill.teacher": "runs/teacher", "distill.top_k": 8, "distill.temperature": 2.0}
DILOCO = {"diloco.every": 4, "diloco.fragments": 2, "diloco.outer_dtype": "bfloat16"}
OVERLAP = DILOCO | {"diloco.overlap": 2}
REPLICAS = axes(data=4, replica=2)
STAGES = axes(data=4, pipeline=2, num_microbatches=4, zero=1) | {"model.num_layers": 4}
SPREAD = {"parallel.expert_tensor": 1}

#: Name -> changes to TINY, of train steps.
MODELS: dict[str, dict] = {
    "latent": axes(data=8) | LATENT,
    "latent, tensor": axes(data=4, tensor=2) | LATENT,
    "latent, sequence": axes(data=2, sequence=2, tensor=2, context="ring") | LATENT_LITE,
    "latent, pipeline": axes(data=2, pipeline=2, tensor=2, num_microbatches=2, zero=1) | LATENT,
    "latent, float8": axes(data=4, tensor=2)
    | {"model.layers.mixer": _with(_LATENT, qk_nope_head_dim=8, qk_rope_head_dim=16)}
    | F8,
    "latent, row groups": axes(data=4, tensor=2, row_groups=2) | LATENT,
    "latent, lora": axes(data=8)
    | LATENT
    | LORA
    | {"lora.targets": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")},
    "deepseek, mtp": axes(data=2, expert=2, tensor=2) | DEEPSEEK | MTP,
    "delta rule": axes(data=8) | DELTA_NET,
    "delta rule, meshes": axes(data=2, tensor=2, sequence=2) | DELTA_NET,
    "delta rule, norms before": axes(data=4, tensor=2) | OLMO_HYBRID,
    "delta rule, experts": axes(data=2, expert=2, tensor=2)
    | DELTA_NET
    | {"model.*.feed_forward": _with(FOUR_EXPERTS, num_shared_experts=1, shared_expert_gate=True)},
    "kda": axes(data=8) | KDA,
    "kda, meshes": axes(data=2, tensor=2, sequence=2) | KDA,
    "mamba": axes(data=8) | MAMBA,
    "mamba, meshes": axes(data=2, tensor=2, sequence=2) | MAMBA,
    "mamba, pipeline": axes(data=4, pipeline=2, num_microbatches=2, zero=1)
    | {"model.layers": MAMBA["model.layers"] * 2},
    "mamba, experts": axes(data=4, tensor=2) | NEMOTRON_3,
    "mtp": axes(data=8) | MTP,
    "mtp, pipeline": axes(data=2, tensor=2, pipeline=2, num_microbatches=2, zero=1) | MTP,
    "gpipe": STAGES | axes(schedule="gpipe"),
    "gpipe, inputs, zero 3": STAGES | axes(schedule="gpipe", pipeline_save="inputs", zero=3),
    "zero bubble": STAGES | axes(schedule="zero_bubble"),
    "zero bubble, virtual": STAGES | axes(schedule="zero_bubble", virtual_stages=2),
    "unequal stages": axes(data=4, pipeline=2, num_microbatches=2, zero=1)
    | axes(layers_per_stage=(3, 2))
    | {"model.num_layers": 5},
    "spread experts": axes(data=4, tensor=2) | SPREAD | EXPERTS,
    "spread experts, expert axis": axes(data=2, expert=2, tensor=2) | SPREAD | ROUTER,
    "experts apart, rows": axes(data=2, expert=4, expert_dispatch="rows") | EXPERTS,
    "experts, float8": axes(data=8) | EXPERTS | F8,
    "dpo": axes(data=4, tensor=2) | DPO,
    "dpo, pipeline, lora": axes(data=4, pipeline=2, num_microbatches=2, zero=1) | DPO | LORA,
    "distillation": axes(data=4, tensor=2) | DISTILL,
    "diloco": REPLICAS | DILOCO,
    "global heads": axes(data=4, tensor=2) | GLOBAL,
    "llama 4": axes(data=4, tensor=2) | LLAMA_4,
    "gpt-oss": axes(data=2, expert=2, tensor=2) | GPT_OSS,
    "gpt-3": axes(data=4, tensor=2) | GPT_3,
    "gpt-j": axes(data=4, tensor=2) | GPT_J,
    "granite, softcaps": axes(data=4, tensor=2) | GRANITE | SOFTCAPS,
    "muon, experts, qk clip": axes(data=4, expert=2)
    | EXPERTS
    | {"optimizer.name": "muon", "optimizer.qk_clip": 100.0},
    "adafactor": axes(data=4, tensor=2) | {"optimizer.name": "adafactor"},
    "lion, 8 bits, moving average": axes(data=2, tensor=4)
    | {"optimizer.name": "lion", "optimizer.first_moment_dtype": "8bit"}
    | {"optimizer.moment_block": 32, "optimizer.ema.decay": 0.99},
    "host masters": axes(data=8) | {"optimizer.offload": True, "optimizer.offload_masters": True},
    "mup": axes(data=8) | {"model.mup.base_width": 32, "model.mup.base_depth": 2},
    "replicas, int8": REPLICAS | axes(replica_reduction="int8"),
}

#: Configs of other programs, by program (`traced.py`).
OTHER: dict[str, tuple[str, ...]] = {
    "eval": (
        *("experts, tensor", "spread experts, expert axis", "latent, tensor", "deepseek, mtp"),
        *("delta rule, meshes", "kda", "mamba", "mtp", "dpo", "distillation", "windows"),
        *("zero 2, microbatches", "global heads", "zero bubble, virtual"),
    ),
    "gradient": ("kda", "dpo"),
    "loads": ("experts, tensor",),
    "scores": ("tensor, sequence",),
    "teacher": ("pipeline",),
    "outer step": ("diloco",),
    "begin": ("diloco, overlap",),
    "exchange": ("diloco, overlap",),
    "exchanging": ("diloco, overlap",),
    "apply": ("diloco, overlap",),
}

#: What only other programs have.
ONLY_OTHER: dict[str, dict] = {"diloco, overlap": REPLICAS | OVERLAP}

#: Name -> changes to TINY, of models that generate text, on one device or two tensor ranks.
SAMPLED: dict[str, dict] = {
    "dense": {},
    "windows": WINDOWS,
    "latent": LATENT,
    "delta rule": DELTA_NET,
    "kda": KDA,
    "mamba": MAMBA,
    "experts": ROUTER,
    "global heads": GLOBAL,
    "gpt-oss": GPT_OSS,
}

#: Models whose modules draft tokens.
DRAFTING: dict[str, dict] = {"deepseek, mtp": DEEPSEEK | MTP}

_WIDE_LATENT = LatentAttention(
    num_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512
)
_WIDE_DELTA = GatedDeltaNet(
    num_key_heads=16, num_value_heads=16, key_head_dim=128, value_head_dim=128
)
_WIDE_SSM = Mamba2(num_heads=64, head_dim=64, state_size=128, num_groups=8, min_step=0.02)
_WIDE_SINKS = _with(WIDE_ATTENTION, sinks=True)

#: Name -> changes to LARGE, of train steps lowered for an H200.
CUDA_MODELS: dict[str, dict] = {
    "cuda: latent": axes(data=4, tensor=2) | {"model.layers.mixer": _WIDE_LATENT},
    "cuda: delta rule": axes(data=8)
    | {
        "model.layers": [
            Layer("delta_layers", _WIDE_DELTA, WIDE_GLU),
            Layer("layers", _with(WIDE_ATTENTION, rope=_HALF, gate=True), WIDE_GLU),
        ]
    },
    "cuda: mamba": axes(data=8) | {"model.layers": _mamba(_WIDE_SSM, WIDE_ATTENTION, 4096)},
    "cuda: windows, sinks": axes(data=4, tensor=2)
    | {
        "model.layers": [
            Layer("local", _with(_WIDE_SINKS, window=1024), WIDE_GLU),
            Layer("layers", _WIDE_SINKS, WIDE_GLU),
        ]
    },
}


def fields_of(name: str) -> dict:
    """Changes to TINY of a config, by its name."""
    return (CPU | MODELS | ONLY_OTHER)[name]
