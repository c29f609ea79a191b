"""Kimi K2, DeepSeek-V3's layers with 384 experts: python -m jaxpar.train kimi_k2

A token uses 8 of the experts of a layer and a shared one; a bias balances them
(docs/architectures.md). Pre-training 1.03T parameters takes 16.4 TB of weights, gradients and
moments: at least 256 H200, with --parallel.expert.
"""

from jaxpar.config import Config, Router, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    base = load_config("deepseek_v3")
    dense, *_, moe = base.model.layers
    return replace(
        base,
        **{
            "run.dir": "runs/kimi_k2",
            "model.vocab_size": 163_840,
            "model.layers": [dense] + [moe] * 60,
            "model.*.mixer.num_heads": 64,
            "model.*.mixer.rope.theta": 50_000.0,
            "model.*.mixer.rope.scaling.factor": 32.0,
            "model.*.mixer.rope.scaling.beta_fast": 1.0,
            "model.layers.feed_forward.num_experts": 384,
            "model.layers.feed_forward.router": Router(
                score="sigmoid", balancing_bias=True, scale=2.827
            ),
            "optimizer.learning_rate": 2e-4,
        },
    )
