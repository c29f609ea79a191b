"""Llama 3.2 1B tuned on pairs of responses by DPO: python -m jaxpar.train llama_1b_dpo

Like llama_1b_lora_chat, but it learns which of two responses to a prompt is preferred, from the
pairs in data/pairs (made by `python -m jaxpar.data prepare-pairs`, docs/fine_tuning.md).
"""

from jaxpar.config import Config, replace
from jaxpar.config.command_line import load_config


def get_config() -> Config:
    return replace(
        load_config("llama_1b_lora_chat"),
        **{
            "run.dir": "runs/llama_1b_dpo",
            "data.path": "data/pairs",
            "dpo.beta": 0.1,
            "optimizer.learning_rate": 2e-5,
        },
    )
