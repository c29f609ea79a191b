"""Llama 3.2 1B fine-tuned on conversations: python -m jaxpar.train llama_1b_chat

Starts from the weights in runs/llama_1b_published (made by `python -m jaxpar.convert from-hf`) and
trains on the assistant's tokens in data/chats (made by `python -m jaxpar.data prepare-chat`);
docs/fine_tuning.md has the commands. All weights are trained, with 1/50 of llama_1b's learning
rate.
"""

from jaxpar.config import Config, replace
from jaxpar.config.command_line import load_config


def get_config() -> Config:
    return replace(
        load_config("llama_1b"),
        **{
            "run.dir": "runs/llama_1b_chat",
            "run.init_from": "runs/llama_1b_published",
            "data.path": "data/chats",
            "data.loss_on": "targets",
            "train.num_steps": 1000,
            "optimizer.learning_rate": 1e-5,
            "optimizer.warmup_steps": 50,
            "optimizer.weight_decay": 0.0,
            "checkpoint.every": 200,
            "evaluation.every": 100,
        },
    )
