"""Gemma 3 4B (its text part): python -m jaxpar.train gemma_3/4b

Shape: the text part of the published google/gemma-3-4b-pt; Gemma 3 (2503.19786), section 2. Five of
six layers have a window. --run.init-from takes weights of the class Gemma3ForCausalLM
(docs/convert.md).
"""

from jaxpar.config import Config, RopeScaling, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    base = load_config("gemma_3/1b")
    period = base.model.layers[:6]
    return replace(
        base,
        **{
            "run.dir": "runs/gemma_3_4b",
            "model.d_model": 2560,
            "model.vocab_size": 262_208,
            "model.layers": period * 5 + period[:4],
            "model.*.mixer.num_heads": 8,
            "model.*.mixer.num_kv_heads": 4,
            "model.layers.mixer.window": 1024,
            "model.global_layers.mixer.rope.scaling": RopeScaling(kind="linear"),
            "model.*.feed_forward.d_ff": 10_240,
            "parallel.remat": "attn_out",
        },
    )
