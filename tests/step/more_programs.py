"""Configs of further kinds of models, objectives and programs, by name, as in `programs.py`."""

from tests.step.programs import (
    CPU,
    EXPERTS,
    F8,
    LORA,
    ROUTER,
    WINDOWS,
    axes,
)

#: DeepSeek-V3's attention, and DeepSeek-V2-Lite's, whose queries have no latent.
LATENT = {
    "model.num_kv_heads": 8,
    "model.head_dim": 24,
    "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 16,
    "model.kv_lora_rank": 32,
    "model.q_lora_rank": 48,
    "model.rope_layout": "interleaved",
    "model.rope_scaling.kind": "yarn",
    "model.rope_scaling.original_max_position": 32,
    "model.rope_scaling.mscale_all_dim": 1.0,
    "model.rope_scaling.attention_factor": 1.0,
}
LATENT_LITE = LATENT | {"model.q_lora_rank": None}
DEEPSEEK = LATENT | ROUTER | {"model.dense_layers": 1, "model.num_layers": 3}
DEEPSEEK |= {"model.dense_d_ff": 96, "model.router_groups_per_token": 1}
MTP = {"model.mtp_depth": 2, "train.mtp_loss": 0.3}

#: Layers of several kinds: Qwen3-Next's, Nemotron-H's and Nemotron 3's, Kimi Linear's.
DELTA_NET = {
    "model.layer_pattern": "G*",
    "model.linear_num_key_heads": 4,
    "model.linear_num_value_heads": 8,
    "model.linear_key_head_dim": 16,
    "model.linear_value_head_dim": 16,
    "model.recurrent_chunk": 16,
    "model.attention_gate": True,
    "model.rope_fraction": 0.5,
}
OLMO_HYBRID = DELTA_NET | {
    "model.layer_pattern": "GG*",
    "model.num_layers": 3,
    "model.qk_norm": True,
    "model.qk_norm_over": "all",
    "model.pre_norms": False,
    "model.post_norms": True,
    "model.recurrent_norms": "before",
    "model.linear_allow_neg_eigval": True,
    "model.attention_gate": False,
}
KDA = LATENT_LITE | {
    "model.layer_pattern": "kK*",
    "model.num_layers": 3,
    "model.rope_fraction": 0.0,
    "model.linear_num_key_heads": 8,
    "model.linear_num_value_heads": 8,
    "model.linear_key_head_dim": 16,
    "model.linear_value_head_dim": 16,
    "model.recurrent_chunk": 16,
    "model.num_experts": 4,
    "model.num_shared_experts": 1,
    "model.dense_d_ff": 96,
    "model.router_score": "sigmoid",
    "model.router_bias": True,
}
KDA = {name: value for name, value in KDA.items() if not name.startswith("model.rope_scaling")}
MAMBA = {
    "model.layer_pattern": "M-*-",
    "model.num_layers": 4,
    "model.mamba_num_heads": 8,
    "model.mamba_head_dim": 16,
    "model.mamba_state_size": 16,
    "model.mamba_num_groups": 4,
    "model.mamba_min_step": 0.02,
    "model.recurrent_chunk": 16,
    "model.rope_fraction": 0.0,
    "model.mlp_gate": False,
    "model.activation": "relu_squared",
}
NEMOTRON_3 = MAMBA | EXPERTS
NEMOTRON_3 |= {"model.layer_pattern": "ME*E-", "model.num_layers": 5, "model.dense_d_ff": 96}
NEMOTRON_3 |= {"model.num_shared_experts": 2, "model.router_score": "sigmoid"}
NEMOTRON_3 |= {"model.router_bias": True}

#: Gemma 4's global layers, Llama 4's chunks, gpt-oss's sinks, GPT-3's and GPT-J's blocks, Granite.
GLOBAL = {
    "model.layer_pattern": "*A",
    "model.sliding_window": 16,
    "model.global_head_dim": 32,
    "model.global_num_kv_heads": 2,
    "model.global_keys_as_values": True,
    "model.local_rope_theta": 1e4,
    "model.qk_norm": True,
    "model.value_norm": True,
    "model.layer_scale": True,
    "model.post_norms": True,
}
CHUNKS = {
    "model.attention_chunk": 16,
    "model.global_every": 2,
    "model.nope_every": 2,
    "model.nope_query_beta": 0.3,
    "model.nope_query_span": 4,
    "model.qk_norm": True,
    "model.qk_norm_gain": False,
}
LLAMA_4 = CHUNKS | EXPERTS | {"model.router_scales_input": True, "model.router_score": "sigmoid"}
LLAMA_4 |= {"model.experts_per_token": 1, "model.normalize_experts": False, "model.moe_every": 2}
LLAMA_4 |= {"model.num_shared_experts": 1, "model.dense_layers": 1}
GPT_OSS = EXPERTS | {
    "model.attention_sinks": True,
    "model.global_every": 2,
    "model.sliding_window": 16,
    "model.expert_bias": True,
    "model.router_linear_bias": True,
    "model.activation": "clamped_swiglu",
    "model.qkv_bias": True,
    "model.out_bias": True,
}
GPT_3 = {
    "model.norm": "layer",
    "model.mlp_gate": False,
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.max_positions": 64,
    "model.qkv_bias": True,
    "model.out_bias": True,
    "model.mlp_bias": True,
}
GPT_J = {
    "model.norm": "layer",
    "model.mlp_gate": False,
    "model.activation": "gelu_exact",
    "model.parallel_block": True,
    "model.shared_norm": True,
    "model.mlp_bias": True,
    "model.rope_fraction": 0.5,
}
GRANITE = {
    "model.embedding_multiplier": 12.0,
    "model.residual_multiplier": 0.2,
    "model.logits_scaling": 8.0,
    "model.attention_multiplier": 0.01,
}
SOFTCAPS = {"model.attention_softcap": 50.0, "model.logits_softcap": 30.0}

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
    "latent, float8": axes(data=4, tensor=2) | LATENT | F8 | {"model.qk_rope_head_dim": 16},
    "latent, row groups": axes(data=4, tensor=2, row_groups=2) | LATENT,
    "latent, lora": axes(data=8)
    | LATENT
    | LORA
    | {"lora.targets": "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"},
    "deepseek, mtp": axes(data=2, expert=2, tensor=2) | DEEPSEEK | MTP,
    "delta rule": axes(data=8) | DELTA_NET,
    "delta rule, meshes": axes(data=2, tensor=2, sequence=2) | DELTA_NET,
    "delta rule, norms before": axes(data=4, tensor=2) | OLMO_HYBRID,
    "delta rule, experts": axes(data=2, expert=2, tensor=2)
    | DELTA_NET
    | EXPERTS
    | {"model.num_shared_experts": 1, "model.shared_expert_gate": True},
    "kda": axes(data=8) | KDA,
    "kda, meshes": axes(data=2, tensor=2, sequence=2) | KDA,
    "mamba": axes(data=8) | MAMBA,
    "mamba, meshes": axes(data=2, tensor=2, sequence=2) | MAMBA,
    "mamba, pipeline": axes(data=4, pipeline=2, num_microbatches=2, zero=1)
    | MAMBA
    | {"model.num_layers": 8},
    "mamba, experts": axes(data=4, tensor=2) | NEMOTRON_3,
    "mtp": axes(data=8) | MTP,
    "mtp, pipeline": axes(data=2, tensor=2, pipeline=2, num_microbatches=2, zero=1) | MTP,
    "gpipe": STAGES | axes(schedule="gpipe"),
    "gpipe, inputs, zero 3": STAGES | axes(schedule="gpipe", pipeline_save="inputs", zero=3),
    "zero bubble": STAGES | axes(schedule="zero_bubble"),
    "zero bubble, virtual": STAGES | axes(schedule="zero_bubble", virtual_stages=2),
    "unequal stages": axes(data=4, pipeline=2, num_microbatches=2, zero=1)
    | axes(layers_per_stage="3,2")
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
    | {"optimizer.moment_block": 32, "optimizer.ema_decay": 0.99},
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
    "windows": WINDOWS | {"model.num_layers": 4},
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

_WIDE_LATENT = {
    "model.num_kv_heads": 16,
    "model.head_dim": 192,
    "model.qk_rope_head_dim": 64,
    "model.v_head_dim": 128,
    "model.kv_lora_rank": 512,
    "model.q_lora_rank": None,
}
_WIDE_HEADS = {"model.linear_num_key_heads": 16, "model.linear_num_value_heads": 16}
_WIDE_HEADS |= {"model.linear_key_head_dim": 128, "model.linear_value_head_dim": 128}
_WIDE_HEADS |= {"model.recurrent_chunk": 64}

#: Name -> changes to LARGE, of train steps lowered for an H200.
CUDA_MODELS: dict[str, dict] = {
    "cuda: latent": axes(data=4, tensor=2) | _WIDE_LATENT,
    "cuda: delta rule": axes(data=8) | DELTA_NET | _WIDE_HEADS,
    "cuda: mamba": axes(data=8)
    | MAMBA
    | {"model.mamba_num_heads": 64, "model.mamba_head_dim": 64, "model.mamba_state_size": 128}
    | {"model.mamba_num_groups": 8, "model.recurrent_chunk": 64},
    "cuda: windows, sinks": axes(data=4, tensor=2)
    | {"model.attention_sinks": True, "model.sliding_window": 1024, "model.global_every": 2},
}


def fields_of(name: str) -> dict:
    """Changes to TINY of a config, by its name."""
    return (CPU | MODELS | ONLY_OTHER)[name]
