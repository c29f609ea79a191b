"""Gemma 3 270M: python -m jaxpar.train gemma_3/270m

Shape: the published google/gemma-3-270m; Gemma 3 (2503.19786), section 2. Five of six layers have a
window. --run.init-from takes the published weights (docs/convert.md).
"""

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    return replace(
        load_config("gemma_3/1b"),
        **{
            "run.dir": "runs/gemma_3_270m",
            "model.d_model": 640,
            "model.num_layers": 18,
            "model.*.feed_forward.d_ff": 2048,
        },
    )
