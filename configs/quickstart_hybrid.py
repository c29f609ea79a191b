"""The quickstart as a hybrid model: python -m jaxpar.train quickstart_hybrid

Its layers are those of Qwen3-Next, without experts: of every four, three have Gated DeltaNet in
place of attention (docs/architectures.md).
"""

from jaxpar.config import Attention, Config, GatedDeltaNet, Glu, Layer, QkNorm, Rope, replace
from jaxpar.config.config_file import load_config


def get_config() -> Config:
    delta_net = GatedDeltaNet(
        num_key_heads=4, num_value_heads=8, key_head_dim=16, value_head_dim=16
    )
    attention = Attention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope=Rope(fraction=0.25),
        qk_norm=QkNorm(),
        gate=True,
    )
    delta = Layer("delta_layers", delta_net, Glu(384))
    attends = Layer("layers", attention, Glu(384))
    return replace(
        load_config("quickstart"),
        **{
            "run.dir": "runs/quickstart_hybrid",
            "model.layers": [delta] * 3 + [attends],
            "model.norm.offset": True,
            "data.seq_len": 64,
            "train.global_batch_size": 32,
        },
    )
