"""Llama 3.3 70B on 64 GPUs, or 8 times any other power of two: python -m jaxpar.train llama3_3_70b

Shape: the published Llama 3.3 70B (also Llama 3.1 70B), which is Llama 3 70B with scaled RoPE.
--run.init-from takes the published weights (docs/convert.md).
"""

from jaxpar.config import Config, RopeScaling, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("llama3_70b"),
        **{
            "run.dir": "runs/llama3_3_70b",
            "model.*.mixer.rope.scaling": RopeScaling(),
        },
    )
