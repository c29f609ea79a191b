"""Tensors of published layers, in groups that families share (`families.py`)."""

import dataclasses

from jaxpar.convert.hf.tensor_layout import Entry

LAYER = "model.layers.{L}."
IN_ATTENTION = LAYER + "self_attn."

TOP = (
    Entry("embed", "model.embed_tokens.weight", "VD", "V D"),
    Entry("final_norm", "model.norm.weight", "D", "D"),
    Entry("head", "lm_head.weight", "DV", "V D"),
)
ATTENTION = (
    Entry("layers/attn_norm", LAYER + "input_layernorm.weight", "LD", "D"),
    Entry("layers/wq", IN_ATTENTION + "q_proj.weight", "LDHK", "HK D"),
    Entry("layers/wk", IN_ATTENTION + "k_proj.weight", "LDGK", "GK D"),
    Entry("layers/wv", IN_ATTENTION + "v_proj.weight", "LDGK", "GK D"),
    Entry("layers/wo", IN_ATTENTION + "o_proj.weight", "LHKD", "D HK"),
)
QKV_BIAS = (
    Entry("layers/bq", IN_ATTENTION + "q_proj.bias", "LHK", "HK"),
    Entry("layers/bk", IN_ATTENTION + "k_proj.bias", "LGK", "GK"),
    Entry("layers/bv", IN_ATTENTION + "v_proj.bias", "LGK", "GK"),
)
OUT_BIAS = (Entry("layers/bo", IN_ATTENTION + "o_proj.bias", "LD", "D"),)
QK_NORM = (
    Entry("layers/q_norm", IN_ATTENTION + "q_norm.weight", "LK", "K"),
    Entry("layers/k_norm", IN_ATTENTION + "k_norm.weight", "LK", "K"),
)
QK_NORM_OVER_ALL = (
    Entry("layers/q_norm", IN_ATTENTION + "q_norm.weight", "LHK", "HK"),
    Entry("layers/k_norm", IN_ATTENTION + "k_norm.weight", "LGK", "GK"),
)
MLP = (
    Entry("layers/mlp_norm", LAYER + "post_attention_layernorm.weight", "LD", "D"),
    Entry("layers/w_gate", LAYER + "mlp.gate_proj.weight", "LDF", "F D"),
    Entry("layers/w_up", LAYER + "mlp.up_proj.weight", "LDF", "F D"),
    Entry("layers/w_down", LAYER + "mlp.down_proj.weight", "LFD", "D F"),
)
MLP_BIAS = (
    Entry("layers/b_gate", LAYER + "mlp.gate_proj.bias", "LF", "F"),
    Entry("layers/b_up", LAYER + "mlp.up_proj.bias", "LF", "F"),
    Entry("layers/b_down", LAYER + "mlp.down_proj.bias", "LD", "D"),
)
MLP_NORM = MLP[:1]
#: Heads of queries, keys and values in one tensor, and gate and up in one (Phi-3, Phi-4).
PHI3_LAYERS = (
    *(ATTENTION[0], ATTENTION[-1], MLP[0], MLP[-1]),
    Entry("layers/wq", IN_ATTENTION + "qkv_proj.weight", "LDHK", "[HGG]K D", part=0),
    Entry("layers/wk", IN_ATTENTION + "qkv_proj.weight", "LDGK", "[HGG]K D", part=1),
    Entry("layers/wv", IN_ATTENTION + "qkv_proj.weight", "LDGK", "[HGG]K D", part=2),
    Entry("layers/w_gate", LAYER + "mlp.gate_up_proj.weight", "LDF", "2F D", part=0),
    Entry("layers/w_up", LAYER + "mlp.gate_up_proj.weight", "LDF", "2F D", part=1),
)
MIXTRAL_EXPERTS = (
    Entry("layers/router", LAYER + "block_sparse_moe.gate.weight", "LDE", "E D"),
    Entry("layers/w_gate", LAYER + "block_sparse_moe.experts.{E}.w1.weight", "LEDF", "F D"),
    Entry("layers/w_up", LAYER + "block_sparse_moe.experts.{E}.w3.weight", "LEDF", "F D"),
    Entry("layers/w_down", LAYER + "block_sparse_moe.experts.{E}.w2.weight", "LEFD", "D F"),
)
EXPERTS = (
    Entry("layers/router", LAYER + "mlp.gate.weight", "LDE", "E D"),
    Entry("layers/w_gate", LAYER + "mlp.experts.{E}.gate_proj.weight", "LEDF", "F D"),
    Entry("layers/w_up", LAYER + "mlp.experts.{E}.up_proj.weight", "LEDF", "F D"),
    Entry("layers/w_down", LAYER + "mlp.experts.{E}.down_proj.weight", "LEFD", "D F"),
)
OLMO2_NORMS = (
    Entry("layers/attn_post_norm", LAYER + "post_attention_layernorm.weight", "LD", "D"),
    Entry("layers/mlp_post_norm", LAYER + "post_feedforward_layernorm.weight", "LD", "D"),
)
SINKS = (Entry("layers/sinks", IN_ATTENTION + "sinks", "LH", "H"),)
#: Gate and up alternate in the last dimension of a tensor.
GPT_OSS_EXPERTS = (
    Entry("layers/router", LAYER + "mlp.router.weight", "LDE", "E D"),
    Entry("layers/b_router", LAYER + "mlp.router.bias", "LE", "E"),
    Entry("layers/w_gate", LAYER + "mlp.experts.gate_up_proj", "LEDF", "E D F2", part=0),
    Entry("layers/w_up", LAYER + "mlp.experts.gate_up_proj", "LEDF", "E D F2", part=1),
    Entry("layers/b_gate", LAYER + "mlp.experts.gate_up_proj_bias", "LEF", "E F2", part=0),
    Entry("layers/b_up", LAYER + "mlp.experts.gate_up_proj_bias", "LEF", "E F2", part=1),
    Entry("layers/w_down", LAYER + "mlp.experts.down_proj", "LEFD", "E F D"),
    Entry("layers/b_down", LAYER + "mlp.experts.down_proj_bias", "LED", "E D"),
)
_FEED_FORWARD = LAYER + "feed_forward."
#: Gate, then up, in the last dimension of a tensor.
LLAMA4_EXPERTS = (
    Entry("layers/router", _FEED_FORWARD + "router.weight", "LDE", "E D"),
    Entry("layers/w_gate", _FEED_FORWARD + "experts.gate_up_proj", "LEDF", "E D 2F", part=0),
    Entry("layers/w_up", _FEED_FORWARD + "experts.gate_up_proj", "LEDF", "E D 2F", part=1),
    Entry("layers/w_down", _FEED_FORWARD + "experts.down_proj", "LEFD", "E F D"),
    Entry("layers/w_shared_gate", _FEED_FORWARD + "shared_expert.gate_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_up", _FEED_FORWARD + "shared_expert.up_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_down", _FEED_FORWARD + "shared_expert.down_proj.weight", "LSD", "D S"),
)
LLAMA4_MLP = tuple(
    dataclasses.replace(entry, name=entry.name.replace(".mlp.", ".feed_forward.")) for entry in MLP
)
GPT2_LAYER = "transformer.h.{L}."
#: Matrices are stored as [in, out].
GPT2_LAYERS = (
    Entry("layers/attn_norm", GPT2_LAYER + "ln_1.weight", "LD", "D"),
    Entry("layers/attn_norm_bias", GPT2_LAYER + "ln_1.bias", "LD", "D"),
    Entry("layers/wq", GPT2_LAYER + "attn.c_attn.weight", "LDHK", "D 3HK", part=0),
    Entry("layers/wk", GPT2_LAYER + "attn.c_attn.weight", "LDGK", "D 3GK", part=1),
    Entry("layers/wv", GPT2_LAYER + "attn.c_attn.weight", "LDGK", "D 3GK", part=2),
    Entry("layers/bq", GPT2_LAYER + "attn.c_attn.bias", "LHK", "3HK", part=0),
    Entry("layers/bk", GPT2_LAYER + "attn.c_attn.bias", "LGK", "3GK", part=1),
    Entry("layers/bv", GPT2_LAYER + "attn.c_attn.bias", "LGK", "3GK", part=2),
    Entry("layers/wo", GPT2_LAYER + "attn.c_proj.weight", "LHKD", "HK D"),
    Entry("layers/bo", GPT2_LAYER + "attn.c_proj.bias", "LD", "D"),
    Entry("layers/mlp_norm", GPT2_LAYER + "ln_2.weight", "LD", "D"),
    Entry("layers/mlp_norm_bias", GPT2_LAYER + "ln_2.bias", "LD", "D"),
    Entry("layers/w_up", GPT2_LAYER + "mlp.c_fc.weight", "LDF", "D F"),
    Entry("layers/b_up", GPT2_LAYER + "mlp.c_fc.bias", "LF", "F"),
    Entry("layers/w_down", GPT2_LAYER + "mlp.c_proj.weight", "LFD", "F D"),
    Entry("layers/b_down", GPT2_LAYER + "mlp.c_proj.bias", "LD", "D"),
)
GPT2_TOP = (
    Entry("embed", "transformer.wte.weight", "VD", "V D"),
    Entry("positions", "transformer.wpe.weight", "ZD", "Z D"),
    Entry("final_norm", "transformer.ln_f.weight", "D", "D"),
    Entry("final_norm_bias", "transformer.ln_f.bias", "D", "D"),
    Entry("head", "lm_head.weight", "DV", "V D"),
)
NEOX_LAYER = "gpt_neox.layers.{L}."
#: Each head's query, key and value follow one another.
NEOX_LAYERS = (
    Entry("layers/attn_norm", NEOX_LAYER + "input_layernorm.weight", "LD", "D"),
    Entry("layers/attn_norm_bias", NEOX_LAYER + "input_layernorm.bias", "LD", "D"),
    Entry("layers/wq", NEOX_LAYER + "attention.query_key_value.weight", "LDHK", "H3K D", part=0),
    Entry("layers/wk", NEOX_LAYER + "attention.query_key_value.weight", "LDGK", "G3K D", part=1),
    Entry("layers/wv", NEOX_LAYER + "attention.query_key_value.weight", "LDGK", "G3K D", part=2),
    Entry("layers/bq", NEOX_LAYER + "attention.query_key_value.bias", "LHK", "H3K", part=0),
    Entry("layers/bk", NEOX_LAYER + "attention.query_key_value.bias", "LGK", "G3K", part=1),
    Entry("layers/bv", NEOX_LAYER + "attention.query_key_value.bias", "LGK", "G3K", part=2),
    Entry("layers/wo", NEOX_LAYER + "attention.dense.weight", "LHKD", "D HK"),
    Entry("layers/bo", NEOX_LAYER + "attention.dense.bias", "LD", "D"),
    Entry("layers/mlp_norm", NEOX_LAYER + "post_attention_layernorm.weight", "LD", "D"),
    Entry("layers/mlp_norm_bias", NEOX_LAYER + "post_attention_layernorm.bias", "LD", "D"),
    Entry("layers/w_up", NEOX_LAYER + "mlp.dense_h_to_4h.weight", "LDF", "F D"),
    Entry("layers/b_up", NEOX_LAYER + "mlp.dense_h_to_4h.bias", "LF", "F"),
    Entry("layers/w_down", NEOX_LAYER + "mlp.dense_4h_to_h.weight", "LFD", "D F"),
    Entry("layers/b_down", NEOX_LAYER + "mlp.dense_4h_to_h.bias", "LD", "D"),
)
NEOX_TOP = (
    Entry("embed", "gpt_neox.embed_in.weight", "VD", "V D"),
    Entry("final_norm", "gpt_neox.final_layer_norm.weight", "D", "D"),
    Entry("final_norm_bias", "gpt_neox.final_layer_norm.bias", "D", "D"),
    Entry("head", "embed_out.weight", "DV", "V D"),
)
#: LayerNorms, and a feed-forward without gate, of StarCoder2.
STARCODER2_LAYERS = (
    Entry("final_norm_bias", "model.norm.bias", "D", "D"),
    Entry("layers/attn_norm_bias", LAYER + "input_layernorm.bias", "LD", "D"),
    MLP[0],
    Entry("layers/mlp_norm_bias", LAYER + "post_attention_layernorm.bias", "LD", "D"),
    Entry("layers/w_up", LAYER + "mlp.c_fc.weight", "LDF", "F D"),
    Entry("layers/b_up", LAYER + "mlp.c_fc.bias", "LF", "F"),
    Entry("layers/w_down", LAYER + "mlp.c_proj.weight", "LFD", "D F"),
    Entry("layers/b_down", LAYER + "mlp.c_proj.bias", "LD", "D"),
)
#: What the layers of DeepSeek-V3 and its relatives have beside EXPERTS.
SHARED_EXPERTS = (
    Entry("layers/router_bias", LAYER + "mlp.gate.e_score_correction_bias", "LE", "E"),
    Entry("layers/w_shared_gate", LAYER + "mlp.shared_experts.gate_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_up", LAYER + "mlp.shared_experts.up_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_down", LAYER + "mlp.shared_experts.down_proj.weight", "LSD", "D S"),
)
#: Multi-head latent attention. A model has either `wq`, or a latent of queries.
LATENT_ATTENTION = (
    Entry("layers/attn_norm", LAYER + "input_layernorm.weight", "LD", "D"),
    Entry("layers/wq", IN_ATTENTION + "q_proj.weight", "LDHK", "HK D"),
    Entry("layers/wq_a", IN_ATTENTION + "q_a_proj.weight", "LDQ", "Q D"),
    Entry("layers/q_a_norm", IN_ATTENTION + "q_a_layernorm.weight", "LQ", "Q"),
    Entry("layers/wq_b", IN_ATTENTION + "q_b_proj.weight", "LQHK", "HK Q"),
    Entry("layers/wkv_a", IN_ATTENTION + "kv_a_proj_with_mqa.weight", "LDA", "A D"),
    Entry("layers/kv_a_norm", IN_ATTENTION + "kv_a_layernorm.weight", "LC", "C"),
    Entry("layers/wkv_b", IN_ATTENTION + "kv_b_proj.weight", "LCHB", "HB C"),
    Entry("layers/wo", IN_ATTENTION + "o_proj.weight", "LHID", "D HI"),
)
_MODULE = (
    Entry("layers/embed_norm", LAYER + "enorm.weight", "LD", "D"),
    Entry("layers/hidden_norm", LAYER + "hnorm.weight", "LD", "D"),
    Entry("layers/w_join", LAYER + "eh_proj.weight", "LXDY", "Y XD"),
    Entry("layers/out_norm", LAYER + "shared_head.norm.weight", "LD", "D"),
)
GEMMA_NORMS = (
    Entry("layers/attn_post_norm", LAYER + "post_attention_layernorm.weight", "LD", "D"),
    Entry("layers/mlp_norm", LAYER + "pre_feedforward_layernorm.weight", "LD", "D"),
    Entry("layers/mlp_post_norm", LAYER + "post_feedforward_layernorm.weight", "LD", "D"),
)


def of_modules(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries of modules for multi-token prediction (`model.mtp_depth`), whose layers
    come after the others, from those of layers."""
    return tuple(
        dataclasses.replace(
            entry,
            path=entry.path.replace("layers/", "mtp/"),
            name=entry.name.replace("{L}", "{P}"),
            ours=entry.ours.replace("L", "P"),
        )
        for entry in (*entries, *_MODULE)
    )


_IN_LINEAR = LAYER + "linear_attn."


def sections(
    names: dict[str, str], tensor: str, theirs: str, of_each: tuple[str, ...]
) -> tuple[Entry, ...]:
    """Return the entries of parameters that follow one another in a tensor.

    Args:     names: the dimensions of each parameter, by path. of_each: `Entry.sections`.
    """
    return tuple(
        Entry(path, tensor, ours, theirs, part=part, sections=of_each)
        for part, (path, ours) in enumerate(names.items())
    )


#: A head's queries, then its output gate.
GATED_ATTENTION = (
    ATTENTION[0],
    *sections(
        {"layers/wq": "LDHK", "layers/w_attn_gate": "LDHK"},
        IN_ATTENTION + "q_proj.weight",
        "H+ D",
        ("K", "K"),
    ),
    *ATTENTION[2:],
)
QWEN3_NEXT_EXPERTS = (
    *EXPERTS,
    Entry("layers/w_shared_gate", LAYER + "mlp.shared_expert.gate_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_up", LAYER + "mlp.shared_expert.up_proj.weight", "LDS", "S D"),
    Entry("layers/w_shared_down", LAYER + "mlp.shared_expert.down_proj.weight", "LSD", "D S"),
    Entry("layers/w_shared_router", LAYER + "mlp.shared_expert_gate.weight", "LD", "1 D"),
)
#: What Gated DeltaNet has of its own. Each key head's rows are together in the first two.
_DELTA_NET = (
    *sections(
        {f"layers/delta_conv_{n}": f"Lg{d}w" for n, d in zip("qkv", "kkm", strict=True)},
        _IN_LINEAR + "conv1d.weight",
        "+ 1 w",
        ("gk", "gk", "gm"),
    ),
    Entry("layers/delta_a_log", _IN_LINEAR + "A_log", "Lh", "h"),
    Entry("layers/delta_dt_bias", _IN_LINEAR + "dt_bias", "Lh", "h"),
    Entry("layers/delta_norm", _IN_LINEAR + "norm.weight", "Lv", "v"),
    Entry("layers/delta_out", _IN_LINEAR + "out_proj.weight", "LhvD", "D hv"),
)
_QKV = {f"layers/delta_{n}": f"LDg{d}" for n, d in zip("qkv", "kkm", strict=True)}
_QKVZ = _QKV | {"layers/delta_z": "LDgm"}
_BA = {"layers/delta_b": "LDgr", "layers/delta_a": "LDgr"}
#: Each key head's rows are together.
QWEN3_NEXT_DELTA_NET = (
    *sections(_QKVZ, _IN_LINEAR + "in_proj_qkvz.weight", "g+ D", ("k", "k", "m", "m")),
    *sections(_BA, _IN_LINEAR + "in_proj_ba.weight", "g+ D", ("r", "r")),
    *_DELTA_NET,
)
QWEN3_5_DELTA_NET = (
    *sections(_QKV, _IN_LINEAR + "in_proj_qkv.weight", "+ D", ("gk", "gk", "gm")),
    Entry("layers/delta_z", _IN_LINEAR + "in_proj_z.weight", "LDgm", "gm D"),
    Entry("layers/delta_b", _IN_LINEAR + "in_proj_b.weight", "LDgr", "gr D"),
    Entry("layers/delta_a", _IN_LINEAR + "in_proj_a.weight", "LDgr", "gr D"),
    *_DELTA_NET,
)


#: OLMo Hybrid: a tensor for each.
OLMO_HYBRID_DELTA_NET = (
    *(
        Entry(f"layers/delta_{n}", f"{_IN_LINEAR}{n}_proj.weight", f"LDg{d}", f"g{d} D")
        for n, d in zip("qkvba", "kkmrr", strict=True)
    ),
    Entry("layers/delta_z", _IN_LINEAR + "g_proj.weight", "LDgm", "gm D"),
    *(
        Entry(f"layers/delta_conv_{n}", f"{_IN_LINEAR}{n}_conv1d.weight", f"Lg{d}w", f"g{d} 1 w")
        for n, d in zip("qkv", "kkm", strict=True)
    ),
    Entry("layers/delta_a_log", _IN_LINEAR + "A_log", "Lh", "h"),
    Entry("layers/delta_dt_bias", _IN_LINEAR + "dt_bias", "Lh", "h"),
    Entry("layers/delta_norm", _IN_LINEAR + "o_norm.weight", "Lv", "v"),
    Entry("layers/delta_out", _IN_LINEAR + "o_proj.weight", "LhvD", "D hv"),
)


#: Kimi Delta Attention.
KIMI_DELTA = (
    *(
        Entry(f"layers/kda_{n}", f"{IN_ATTENTION}{n}_proj.weight", f"LDg{d}", f"g{d} D")
        for n, d in zip("qkv", "kkv", strict=True)
    ),
    *(
        Entry(f"layers/kda_conv_{n}", f"{IN_ATTENTION}{n}_conv1d.weight", f"Lg{d}w", f"g{d} 1 w")
        for n, d in zip("qkv", "kkv", strict=True)
    ),
    Entry("layers/kda_b", IN_ATTENTION + "b_proj.weight", "LDg", "g D"),
    Entry("layers/kda_f_a", IN_ATTENTION + "f_a_proj.weight", "LDl", "l D"),
    Entry("layers/kda_f_b", IN_ATTENTION + "f_b_proj.weight", "Llgk", "gk l"),
    Entry("layers/kda_g_a", IN_ATTENTION + "g_a_proj.weight", "LDl", "l D"),
    Entry("layers/kda_g_b", IN_ATTENTION + "g_b_proj.weight", "Llgv", "gv l"),
    Entry("layers/kda_a_log", IN_ATTENTION + "A_log", "Lg", "1 1 g 1"),
    Entry("layers/kda_dt_bias", IN_ATTENTION + "dt_bias", "Lgk", "gk"),
    Entry("layers/kda_norm", IN_ATTENTION + "o_norm.weight", "Lv", "v"),
    Entry("layers/kda_out", IN_ATTENTION + "o_proj.weight", "LgvD", "D gv"),
)


def of_stack(stack: str, letter: str, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries of another stack of layers than `layers`, whose index is a letter."""
    return tuple(
        dataclasses.replace(
            entry,
            path=entry.path.replace("layers", stack),
            name=entry.name.replace("{L}", "{" + letter + "}"),
            ours=entry.ours.replace("L", letter),
        )
        for entry in entries
    )


def of_delta_layers(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries of layers of Gated DeltaNet, from those of layers with its parameters."""
    return of_stack("delta_layers", "J", entries)


def of_global_layers(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries of global layers with heads of their own, from those of the others."""
    heads = str.maketrans({"G": "j", "K": "d", "I": "d"})
    return tuple(
        dataclasses.replace(
            entry, ours=entry.ours.translate(heads), theirs=entry.theirs.translate(heads)
        )
        for entry in of_stack("global_layers", "a", entries)
    )


def of_dense_layers(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries of `model.dense_layers`, from those of layers that are all dense."""

    def letters(text: str) -> str:
        return text.replace("L", "N").replace("F", "W")

    return tuple(
        Entry(f"dense_{a.path}", a.name.replace("{L}", "{N}"), letters(a.ours), letters(a.theirs))
        for a in entries
    )
