"""gpt-oss-120b, 128 experts of which a token uses 4: python -m jaxpar.train gpt_oss_120b

Attention with sinks, with a window of 128 tokens in every second layer. --run.init-from takes the
published weights, in MXFP4 (docs/convert.md). Pre-training 116.8B parameters takes 1,869 GB of
weights, gradients and moments: at least 16 H200, with --parallel.auto all.
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("gpt_oss_20b"),
        **{
            "run.dir": "runs/gpt_oss_120b",
            "model.num_layers": 36,
            "model.*.feed_forward.num_experts": 128,
        },
    )
