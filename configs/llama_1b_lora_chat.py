"""Llama 3.2 1B tuned on conversations by adapters: python -m jaxpar.train llama_1b_lora_chat

As llama_1b_chat, but the model's weights stay as they are; adapters of rank 16 beside every
projection learn, at the ten times higher learning rate that they take (docs/lora.md).
"""

from jaxpar.config import Config, replace
from jaxpar.config.command_line import load_config


def get_config() -> Config:
    return replace(
        load_config("llama_1b_chat"),
        **{
            "run.dir": "runs/llama_1b_lora_chat",
            "lora.rank": 16,
            "lora.alpha": 32.0,
            "optimizer.learning_rate": 1e-4,
        },
    )
