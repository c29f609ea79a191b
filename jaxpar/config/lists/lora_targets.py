"""The parameter of each adapter target, and the scale of adapters."""

import math

from jaxpar.config import Config

#: Names in `lora.targets` (those of published models), and jaxpar's parameters.
TARGETS = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w_gate",
    "up_proj": "w_up",
    "down_proj": "w_down",
}


#: Targets in attention. The others are in a dense feed-forward layer.
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def factor(cfg: Config) -> float:
    """Return the factor that an adapter's output is multiplied by.

    Source:   Hu et al. 2021 (2106.09685), section 4.1; `rank_stabilized`: Kalajdzievski 2023
              (2312.03732), section 3.
    """
    rank = cfg.lora.rank
    return cfg.lora.alpha / (math.sqrt(rank) if cfg.lora.rank_stabilized else rank)
