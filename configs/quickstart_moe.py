"""The quickstart with 8 experts of which a token uses 2: python -m jaxpar.train quickstart_moe"""

from jaxpar.config import Config, Experts, Glu, Router, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    experts = Experts(
        expert=Glu(192), num_experts=8, experts_per_token=2, router=Router(balancing_bias=True)
    )
    return replace(
        load_config("quickstart"),
        **{
            "run.dir": "runs/quickstart_moe",
            "model.*.feed_forward": experts,
            "data.seq_len": 64,
            "train.global_batch_size": 32,
            "train.balance_loss": 1e-4,
            "train.router_bias_rate": 3e-3,
        },
    )
