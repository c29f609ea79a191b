"""Llama 3.2 1B fine-tuned on conversations with LoRA: python -m jaxpar.train llama_1b_lora_chat

Like llama_1b_chat, but the model's weights are frozen. Adapters of rank 16 on every projection are
trained, with 10 times the learning rate (docs/fine_tuning.md).
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
