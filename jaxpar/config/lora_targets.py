"""Which parameter each target of an adapter is, and an adapter's factor."""

import math

from jaxpar.config import Config

#: Names of `lora.targets`, which are those of published models, and our parameters.
TARGETS = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w_gate",
    "up_proj": "w_up",
    "down_proj": "w_down",
}


#: Those of attention. The others are of a dense feed-forward.
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def factor(cfg: Config) -> float:
    """What the product of an adapter's matrices is multiplied by.

    Source:   Hu et al. 2021 (2106.09685), section 4.1; `rank_stabilized`: Kalajdzievski 2023
              (2312.03732), section 3.
    """
    rank = cfg.lora.rank
    return cfg.lora.alpha / (math.sqrt(rank) if cfg.lora.rank_stabilized else rank)
