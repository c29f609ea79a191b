"""Models composed of each kind of component, as runs: tests/convert/test_torch.py."""

import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar import load_config
from jaxpar.checkpoint import weights_alone
from jaxpar.config import Norm, replace
from jaxpar.config.serialize import to_json
from jaxpar.convert import torch_file
from jaxpar.convert.hf.exporting import Opened
from jaxpar.convert.run_arrays import about_import, create_run
from jaxpar.extend import (
    Attention,
    ClampedSwiglu,
    Experts,
    FeedForward,
    GatedDeltaNet,
    Glu,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    Mamba2,
    Mixer,
    Mlp,
    Model,
    MupConfig,
    QkNorm,
    QueryGrowth,
    Rope,
    RopeScaling,
    Router,
    component,
    matrix,
    vector,
)
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.params import ParamSpec, flat
from tests.tiny import TINY


@component
class DecayedMean(Mixer):
    """Each head adds up the values of its document so far, each with a weight that decays."""

    num_heads: int
    power: float = 1.0

    def weights(self, model):
        D, H = model.d_model, self.num_heads
        K, by_head = D // H, ("heads", "head_dim")
        return {
            "mean_v": matrix((D, H, K), ("embed", *by_head), columns=2),
            "mean_rate": vector((H,), ("heads",), "zeros"),
            "mean_out": matrix((H, K, D), (*by_head, "embed"), to_stream=True),
        }

    def compute(self, x, w, tokens):
        v = jnp.einsum("bsd,dhk->bshk", x, w["mean_v"])
        back = tokens.positions[:, :, None] - tokens.positions[:, None]
        seen = (back >= 0) & (tokens.segments[:, :, None] == tokens.segments[:, None])
        rate = 0.1 * self.power * jnp.exp(w["mean_rate"])[:, None, None]
        decay = jnp.where(seen[:, None], jnp.exp(-rate * back[:, None]), 0)
        return jnp.einsum("bhts,bshk,hkd->btd", decay, v, w["mean_out"])


@component
class Sine(FeedForward):
    """Two matrices and a sine."""

    width: int

    def weights(self, model):
        up = matrix((model.d_model, self.width), ("embed", "rank"))
        down = matrix((self.width, model.d_model), ("rank", "embed"), to_stream=True)
        return {"sine_up": up, "sine_down": down}

    def compute(self, x, w, _):
        return jnp.sin(x @ w["sine_up"]) @ w["sine_down"]


HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
YARN = RopeScaling(kind="yarn", factor=4, original_max_position=6, mscale_all_dim=0.7)


def model(*layers: Layer, **fields: Any):
    """A model of tiny widths."""
    return Model(d_model=16, vocab_size=48, layers=layers, **fields)


MODELS = {
    "attention": model(
        Layer("plain", Attention(**HEADS), Glu(24)),
        Layer(
            "local",
            Attention(
                **HEADS,
                window=5,
                rope=Rope(theta=100.0, fraction=0.5, layout="interleaved"),
                qk_norm=QkNorm(),
                value_norm=True,
                bias=True,
                out_bias=True,
                gate=True,
            ),
            Mlp(24, activation="relu_squared", bias=True),
            norms="around",
        ),
        Layer(
            "wide",
            Attention(
                **HEADS,
                rope=None,
                chunk=4,
                growth=QueryGrowth(beta=0.5, span=3),
                keys_as_values=True,
                softcap=2.0,
                sinks=True,
                scale=0.3,
            ),
            Glu(24, activation="gelu"),
            norms="after",
            scaled=True,
        ),
        Layer("plain", Attention(**HEADS), Glu(24)),
        Layer(
            "together",
            Attention(
                **HEADS, qk_norm=QkNorm(over="all"), scale_dim=3, rope=Rope(scaling=RopeScaling())
            ),
            Glu(24, activation="gelu_exact", bias=True),
            parallel="own_norms",
        ),
        Layer(
            "shared", Attention(**HEADS, qk_norm=QkNorm(gain=False)), Glu(24), parallel="one_norm"
        ),
        norm=Norm(kind="layer"),
        tie_embeddings=True,
        embed_scale=True,
        embedding_multiplier=0.5,
        residual_multiplier=0.7,
        logits_scaling=1.5,
        logits_softcap=3.0,
    ),
    "latent": model(
        *[
            Layer(
                "latents",
                LatentAttention(
                    num_heads=4,
                    qk_nope_head_dim=6,
                    qk_rope_head_dim=4,
                    v_head_dim=5,
                    kv_lora_rank=8,
                    q_lora_rank=7,
                    rope=Rope(scaling=YARN),
                    window=9,
                ),
                Glu(24),
            ),
            Layer(
                "direct",
                LatentAttention(
                    num_heads=2,
                    qk_nope_head_dim=6,
                    qk_rope_head_dim=4,
                    v_head_dim=5,
                    kv_lora_rank=8,
                    rope=None,
                ),
                None,
                norms="around",
            ),
        ]
        * 2,
        norm=Norm(offset=True),
    ),
    "gated_delta_net": model(
        *[
            Layer(
                "delta",
                GatedDeltaNet(
                    num_key_heads=2,
                    num_value_heads=4,
                    key_head_dim=6,
                    value_head_dim=5,
                    allow_neg_eigval=True,
                    norm_eps=0.1,
                ),
                Glu(24),
            ),
            Layer("attends", Attention(**HEADS), Glu(24)),
        ]
        * 2
    ),
    "kimi_delta_attention": model(
        *[
            Layer(
                "kda",
                KimiDeltaAttention(num_heads=3, key_head_dim=6, value_head_dim=5, norm_eps=1e-2),
                Glu(24),
            )
        ]
        * 2
    ),
    "mamba2": model(
        Layer(
            "mamba",
            Mamba2(
                num_heads=4, head_dim=5, state_size=6, num_groups=2, min_step=0.05, norm_eps=1e-2
            ),
            None,
        ),
        Layer("mlp", None, Mlp(24, activation="relu_squared")),
    ),
    "experts": model(
        Layer(
            "groups",
            Attention(**HEADS),
            Experts(
                expert=Glu(12),
                num_experts=8,
                experts_per_token=3,
                num_shared_experts=2,
                shared_expert_gate=True,
                router=Router(
                    score="sigmoid", balancing_bias=True, groups=4, groups_per_token=2, scale=2.5
                ),
            ),
        ),
        Layer(
            "clamped",
            Attention(**HEADS),
            Experts(
                expert=Glu(12, activation=ClampedSwiglu(limit=1.0), bias=True),
                num_experts=4,
                experts_per_token=2,
                router=Router(linear_bias=True, normalize=False),
            ),
        ),
        Layer(
            "inputs",
            Attention(**HEADS),
            Experts(
                expert=Mlp(12, activation="gelu"),
                num_experts=4,
                experts_per_token=1,
                router=Router(scales_input=True),
            ),
        ),
    ),
    "mup": model(
        *[Layer("block", Attention(**HEADS, scale_dim=3), Glu(24))] * 3,
        mup=MupConfig(base_width=8, base_head_dim=4, base_depth=2),
    ),
    "own": model(
        *[
            Layer("mean", DecayedMean(num_heads=4), Sine(width=12)),
            Layer("attends", Attention(**HEADS), Glu(24), norms="around"),
            Layer("slow", DecayedMean(num_heads=2, power=0.1), None),
        ]
        * 2
    ),
}


def sigmoid():
    """A model with the attention of configs/sigmoid_attention.py, in windows of 6 keys."""
    own = type(load_config("sigmoid_attention").model.layers[0].mixer)
    return model(*[Layer("block", own(**HEADS, window=6, shift=-1.0), Glu(24))] * 2)


#: What `--code` must name.
CODE = {"own": "tests.convert.composed", "sigmoid": "configs/sigmoid_attention.py"}


def model_named(name: str):
    return sigmoid() if name == "sigmoid" else MODELS[name]


NAMES = [*MODELS, "sigmoid"]


def values_of(path: str, spec: ParamSpec) -> np.ndarray:
    """A parameter's float32 values, a function of its path: about 1 or 0, as it begins."""
    normal = np.random.default_rng(zlib.crc32(path.encode())).standard_normal(spec.shape)
    scale = 0.2 if "norm" in path else 0.3
    return ((spec.init == "ones") + scale * normal).astype(np.float32)


def write_run(folder: Path, name: str) -> Path:
    """A run with the model and these weights, in chunks of all layers, as training saves them."""
    cfg = replace(TINY, **{"model": model_named(name), "run.dir": str(folder)})
    specs, about = flat(param_specs(cfg.model)), about_import(cfg, ["test"])
    arrays = create_run(folder, cfg, {path: spec.shape for path, spec in specs.items()}, about)
    found = {}
    for path, spec in specs.items():
        box, values = tuple(slice(0, n) for n in spec.shape), values_of(path, spec)
        arrays.write(path, box, values)
        found[path] = arrays.counted(path)
        found[path].add(values, [0] * values.ndim)
    weights_alone.seal(folder, about, found)
    (folder / "config.json").write_text(to_json(cfg))
    return folder


def documents() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, positions and documents, int32 [2, 24]: several documents in each row."""
    lengths = (7, 12, 5), (1, 2, 21)
    tokens = np.random.default_rng(2).integers(0, 48, (2, 24), dtype=np.int32)
    positions = [np.concatenate([np.arange(n) for n in row]) for row in lengths]
    segments = [np.repeat(np.arange(1, 4), row) for row in lengths]
    return tokens, *(np.stack(one).astype(np.int32) for one in (positions, segments))


def open_export(run: Path, name: str) -> Opened:
    """The run of a model, for `to_torch`."""
    code = (CODE[name],) if name in CODE else ()
    return torch_file.open_export(run, dtype="float32", code=code)
