"""The names of all parameters in files of `to-torch`, which `torch_model` loads."""

import dataclasses

from jaxpar.config import ModelConfig
from jaxpar.convert.hf.entries import of_dense_layers, of_global_layers, of_stack
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.tensor_layout import Entry

#: Fields that `torch_model` does not read, and their only values: functions of your own.
FIXED = {"attention": "softmax"}

_LAYER = "layers.{L}."

_TOP = (
    Entry("embed", "embed.weight", "VD", "V D"),
    Entry("final_norm", "norm.weight", "D", "D"),
    Entry("final_norm_bias", "norm.bias", "D", "D"),
    Entry("positions", "positions.weight", "ZD", "Z D"),
    Entry("head", "head.weight", "DV", "V D"),
)
_NORMS = (
    Entry("layers/attn_norm", _LAYER + "attn_norm.weight", "LD", "D"),
    Entry("layers/attn_norm_bias", _LAYER + "attn_norm.bias", "LD", "D"),
    Entry("layers/attn_post_norm", _LAYER + "attn_post_norm.weight", "LD", "D"),
)
#: A model has either `wq`, `wk` and `wv`, or latents.
_ATTENTION = (
    Entry("layers/wq", _LAYER + "q.weight", "LDHK", "HK D"),
    Entry("layers/wk", _LAYER + "k.weight", "LDGK", "GK D"),
    Entry("layers/wv", _LAYER + "v.weight", "LDGK", "GK D"),
    Entry("layers/wo", _LAYER + "o.weight", "LHID", "D HI"),
    Entry("layers/bq", _LAYER + "q.bias", "LHK", "HK"),
    Entry("layers/bk", _LAYER + "k.bias", "LGK", "GK"),
    Entry("layers/bv", _LAYER + "v.bias", "LGK", "GK"),
    Entry("layers/bo", _LAYER + "o.bias", "LD", "D"),
    Entry("layers/q_norm", _LAYER + "q_norm.weight", "LK", "K"),
    Entry("layers/k_norm", _LAYER + "k_norm.weight", "LK", "K"),
    Entry("layers/q_norm", _LAYER + "q_norm.weight", "LHK", "HK"),
    Entry("layers/k_norm", _LAYER + "k_norm.weight", "LGK", "GK"),
    Entry("layers/sinks", _LAYER + "sinks", "LH", "H"),
    Entry("layers/w_attn_gate", _LAYER + "gate.weight", "LDHK", "HK D"),
    Entry("layers/wq_a", _LAYER + "q_a.weight", "LDQ", "Q D"),
    Entry("layers/q_a_norm", _LAYER + "q_a_norm.weight", "LQ", "Q"),
    Entry("layers/wq_b", _LAYER + "q_b.weight", "LQHK", "HK Q"),
    Entry("layers/wkv_a", _LAYER + "kv_a.weight", "LDA", "A D"),
    Entry("layers/kv_a_norm", _LAYER + "kv_a_norm.weight", "LC", "C"),
    Entry("layers/wkv_b", _LAYER + "kv_b.weight", "LCHB", "HB C"),
)
_DELTA_NET = (
    Entry("layers/delta_q", _LAYER + "q.weight", "LDgk", "gk D"),
    Entry("layers/delta_k", _LAYER + "k.weight", "LDgk", "gk D"),
    Entry("layers/delta_v", _LAYER + "v.weight", "LDgm", "gm D"),
    Entry("layers/delta_z", _LAYER + "z.weight", "LDgm", "gm D"),
    Entry("layers/delta_b", _LAYER + "b.weight", "LDgr", "gr D"),
    Entry("layers/delta_a", _LAYER + "a.weight", "LDgr", "gr D"),
    Entry("layers/delta_conv_q", _LAYER + "conv_q.weight", "Lgkw", "gk 1 w"),
    Entry("layers/delta_conv_k", _LAYER + "conv_k.weight", "Lgkw", "gk 1 w"),
    Entry("layers/delta_conv_v", _LAYER + "conv_v.weight", "Lgmw", "gm 1 w"),
    Entry("layers/delta_a_log", _LAYER + "a_log", "Lh", "h"),
    Entry("layers/delta_dt_bias", _LAYER + "dt_bias", "Lh", "h"),
    Entry("layers/delta_norm", _LAYER + "norm", "Lv", "v"),
    Entry("layers/delta_out", _LAYER + "o.weight", "LhvD", "D hv"),
)
_MAMBA = (
    Entry("layers/mamba_z", _LAYER + "z.weight", "LDtp", "tp D"),
    Entry("layers/mamba_x", _LAYER + "x.weight", "LDtp", "tp D"),
    Entry("layers/mamba_b", _LAYER + "b.weight", "LDsn", "sn D"),
    Entry("layers/mamba_c", _LAYER + "c.weight", "LDsn", "sn D"),
    Entry("layers/mamba_dt", _LAYER + "dt.weight", "LDt", "t D"),
    Entry("layers/mamba_conv_x", _LAYER + "conv_x.weight", "Ltpw", "tp 1 w"),
    Entry("layers/mamba_bias_x", _LAYER + "conv_x.bias", "Ltp", "tp"),
    Entry("layers/mamba_conv_b", _LAYER + "conv_b.weight", "Lsnw", "sn 1 w"),
    Entry("layers/mamba_bias_b", _LAYER + "conv_b.bias", "Lsn", "sn"),
    Entry("layers/mamba_conv_c", _LAYER + "conv_c.weight", "Lsnw", "sn 1 w"),
    Entry("layers/mamba_bias_c", _LAYER + "conv_c.bias", "Lsn", "sn"),
    Entry("layers/mamba_a_log", _LAYER + "a_log", "Lt", "t"),
    Entry("layers/mamba_dt_bias", _LAYER + "dt_bias", "Lt", "t"),
    Entry("layers/mamba_d", _LAYER + "d", "Lt", "t"),
    Entry("layers/mamba_norm", _LAYER + "norm", "Ltp", "tp"),
    Entry("layers/mamba_out", _LAYER + "o.weight", "LtpD", "D tp"),
)
_KIMI_DELTA = (
    Entry("layers/kda_q", _LAYER + "q.weight", "LDgk", "gk D"),
    Entry("layers/kda_k", _LAYER + "k.weight", "LDgk", "gk D"),
    Entry("layers/kda_v", _LAYER + "v.weight", "LDgv", "gv D"),
    Entry("layers/kda_conv_q", _LAYER + "conv_q.weight", "Lgkw", "gk 1 w"),
    Entry("layers/kda_conv_k", _LAYER + "conv_k.weight", "Lgkw", "gk 1 w"),
    Entry("layers/kda_conv_v", _LAYER + "conv_v.weight", "Lgvw", "gv 1 w"),
    Entry("layers/kda_b", _LAYER + "b.weight", "LDg", "g D"),
    Entry("layers/kda_f_a", _LAYER + "f_a.weight", "LDl", "l D"),
    Entry("layers/kda_f_b", _LAYER + "f_b.weight", "Llgk", "gk l"),
    Entry("layers/kda_g_a", _LAYER + "g_a.weight", "LDl", "l D"),
    Entry("layers/kda_g_b", _LAYER + "g_b.weight", "Llgv", "gv l"),
    Entry("layers/kda_a_log", _LAYER + "a_log", "Lg", "g"),
    Entry("layers/kda_dt_bias", _LAYER + "dt_bias", "Lgk", "gk"),
    Entry("layers/kda_norm", _LAYER + "norm", "Lv", "v"),
    Entry("layers/kda_out", _LAYER + "o.weight", "LgvD", "D gv"),
)
#: Dense, or experts: the ranks of the matrices differ.
_FEED_FORWARD = (
    Entry("layers/mlp_norm", _LAYER + "mlp_norm.weight", "LD", "D"),
    Entry("layers/mlp_norm_bias", _LAYER + "mlp_norm.bias", "LD", "D"),
    Entry("layers/mlp_post_norm", _LAYER + "mlp_post_norm.weight", "LD", "D"),
    Entry("layers/w_gate", _LAYER + "mlp.gate.weight", "LDF", "F D"),
    Entry("layers/w_up", _LAYER + "mlp.up.weight", "LDF", "F D"),
    Entry("layers/w_down", _LAYER + "mlp.down.weight", "LFD", "D F"),
    Entry("layers/b_gate", _LAYER + "mlp.gate.bias", "LF", "F"),
    Entry("layers/b_up", _LAYER + "mlp.up.bias", "LF", "F"),
    Entry("layers/b_down", _LAYER + "mlp.down.bias", "LD", "D"),
    Entry("layers/router", _LAYER + "mlp.router.weight", "LDE", "E D"),
    Entry("layers/b_router", _LAYER + "mlp.router.bias", "LE", "E"),
    Entry("layers/router_bias", _LAYER + "mlp.router_bias", "LE", "E"),
    Entry("layers/w_shared_gate", _LAYER + "mlp.shared.gate.weight", "LDS", "S D"),
    Entry("layers/w_shared_up", _LAYER + "mlp.shared.up.weight", "LDS", "S D"),
    Entry("layers/w_shared_down", _LAYER + "mlp.shared.down.weight", "LSD", "D S"),
    Entry("layers/layer_scale", _LAYER + "layer_scale", "L", "1"),
    Entry("layers/w_shared_router", _LAYER + "mlp.shared_gate.weight", "LD", "1 D"),
    Entry("layers/w_gate", _LAYER + "mlp.experts.{E}.gate.weight", "LEDF", "F D"),
    Entry("layers/w_up", _LAYER + "mlp.experts.{E}.up.weight", "LEDF", "F D"),
    Entry("layers/w_down", _LAYER + "mlp.experts.{E}.down.weight", "LEFD", "D F"),
    Entry("layers/b_gate", _LAYER + "mlp.experts.{E}.gate.bias", "LEF", "F"),
    Entry("layers/b_up", _LAYER + "mlp.experts.{E}.up.bias", "LEF", "F"),
    Entry("layers/b_down", _LAYER + "mlp.experts.{E}.down.bias", "LED", "D"),
)


#: Dense layers beside layers with experts have their own width.
_DENSE = tuple(
    dataclasses.replace(a, ours=a.ours.replace("F", "W"), theirs=a.theirs.replace("F", "W"))
    for a in _FEED_FORWARD
)


#: Models leave out the modules of multi-token prediction, which only training computes.
PLAIN = Family(
    model_type="plain",
    architecture="Decoder",
    entries=(
        *(*_TOP, *_NORMS, *_ATTENTION, *_FEED_FORWARD),
        *of_dense_layers((*_NORMS, *_ATTENTION, *_FEED_FORWARD)),
        *of_global_layers((*_NORMS, *_ATTENTION, *_FEED_FORWARD)),
        *of_stack("delta_layers", "J", (*_NORMS, *_DELTA_NET, *_FEED_FORWARD)),
        *of_stack("mamba_layers", "M", (*_NORMS, *_MAMBA, *_FEED_FORWARD)),
        *of_stack("kda_layers", "T", (*_NORMS, *_KIMI_DELTA, *_FEED_FORWARD)),
        *of_stack("kda_dense_layers", "y", (*_NORMS, *_KIMI_DELTA, *_DENSE)),
        *of_stack("mlp_layers", "U", _DENSE),
        *of_stack("moe_layers", "O", _FEED_FORWARD),
    ),
    fields={f.name: f.name for f in dataclasses.fields(ModelConfig) if f.name not in FIXED},
    fixed=FIXED,
    defaults={},
    sliding=True,
    query_beta=True,
    without=("mtp",),
)
