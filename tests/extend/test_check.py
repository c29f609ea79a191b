"""`check`: what is right passes, and each way to be wrong is found and named."""

import jax
import jax.numpy as jnp
import pytest

from jaxpar import load_config
from jaxpar.certification import conformance
from jaxpar.certification.conformance import CheckError
from jaxpar.components.component import Tokens
from jaxpar.config import ConfigError
from jaxpar.extend import (
    Attention,
    Experts,
    FeedForward,
    GatedDeltaNet,
    Glu,
    Layer,
    Mixer,
    check,
    component,
    matrix,
)
from tests.extend.test_components import DecayedMean, FastRetention, Retention, Sine, Tempered
from tests.slow import slow, slow_but

Sigmoid = type(load_config("sigmoid_attention").model.layers[0].mixer)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}

RIGHT = {
    "retention": FastRetention(num_heads=4),
    "sigmoid": Sigmoid(**HEADS),
    "tempered": Tempered(**HEADS, value_scale=3.0),
    "steps": Retention(num_heads=4),
    "mean": DecayedMean(num_heads=4),
    "sine": Sine(width=16),
    "attention": Layer("block", Attention(**HEADS, window=5), Glu(32), norms="around"),
    "delta": GatedDeltaNet(
        num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8, norm_eps=1e-2
    ),
    "experts": Experts(expert=Glu(12), num_experts=4, experts_per_token=2),
}


@pytest.mark.slow  # quicker: what is wrong on one device, below
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", slow_but(["sine"], RIGHT))
def test_what_is_right_passes(name):
    check(RIGHT[name], meshes=["data=2,tensor=2"] if name == "sine" else None)


@component
class OverLocalHeads(DecayedMean):
    """Subtracts the mean over the heads of a tensor rank, where the sum over ranks is forgotten."""

    def compute(self, x, w, tokens):
        mean = w["mean_v"].mean(axis=1, keepdims=True)
        return super().compute(x, w | {"mean_v": w["mean_v"] - 0.5 * mean}, tokens)


@component
class Looks(DecayedMean):
    """Sees the next token too."""

    def compute(self, x, w, tokens):
        return super().compute(x + 0.1 * jnp.roll(x, -1, 1), w, tokens)


@component
class Leaks(DecayedMean):
    """Sees the documents before."""

    def compute(self, x, w, tokens):
        place = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        return super().compute(x, w, Tokens(place, jnp.ones_like(tokens.segments)))


@component
class DecaysTwice(FastRetention):
    """Its steps are not what it computes."""

    def step(self, x, w, state, positions):
        y, after = super().step(x, w, state, positions)
        return y, after | {"kv": 0.9 * after["kv"]}


@component
class NeedsPlace(FastRetention):
    """Its text depends on the number of rows that came before it."""

    def step(self, x, w, state, positions):
        y, after = super().step(x, w, state, positions)
        return jnp.where(positions[:, None] > 5, 1.01, 1.0) * y, after

    def plain(self, h, w, positions, segments, model):
        return FastRetention.compute(self, h, w, Tokens(positions, segments))


@component
class Undeclared(DecayedMean):
    def compute(self, x, w, tokens):
        return super().compute(x * w["mean_scale"], w, tokens)


@component
class Unread(Sine):
    def weights(self, model):
        return super().weights(model) | {"more": matrix((model.d_model, 4), ("embed", "rank"))}


@component
class Noisy(Sine):
    """Adds noise of the shape that a device has."""

    def compute(self, x, w, _):
        y = super().compute(x, w, _)
        return y + 0.1 * jax.random.normal(jax.random.key(0), y.shape)


@component
class Rounds(DecayedMean):
    """Decays in the dtype of the input, over products that bfloat16 does not tell from 1."""

    def compute(self, x, w, tokens):
        big = jnp.asarray(1024, x.dtype)
        return super().compute((x + big) - big, w, tokens)


@component
class OfOtherDtype(Sine):
    def compute(self, x, w, _):
        return super().compute(x, w, _).astype(jnp.float32)


@component
class Narrow(Sine):
    def compute(self, x, w, _):
        return super().compute(x, w, _)[..., :1]


@component
class Mixes(FeedForward):
    """A feed-forward that reads the token before."""

    def weights(self, model):
        return {"mix": matrix((model.d_model, model.d_model), ("embed", "norm"), to_stream=True)}

    def compute(self, x, w, _):
        return jnp.roll(x, 1, axis=1) @ w["mix"]


ONE = {"meshes": ["data=2,tensor=2"]}

WRONG = [
    (OverLocalHeads(num_heads=4), r"gradients: data=2,tensor=2: gradient of .* is off by \d"),
    (Looks(num_heads=4), r"one device: Looks: a token changes tokens before it, by \d"),
    (Leaks(num_heads=4), "one device: Leaks: a token changes tokens of other documents, by"),
    (DecaysTwice(num_heads=4), "gradients: .* is off by"),
    (NeedsPlace(num_heads=4), r"text: tensor=1: the logits after the token 6 of 3 are off by \d"),
    (Undeclared(num_heads=4), "reads the weight 'mean_scale', which `weights` does not declare"),
    (Unread(width=16), "declares the weight 'more', and nothing depends on it"),
    (Noisy(width=16), r"gradients: data=2,tensor=2: .* is off by \d"),
    (Rounds(num_heads=4), r"bfloat16: the gradient of checked/\w+ in bfloat16 is off by"),
    (OfOtherDtype(width=16), "bfloat16: TypeError: OfOtherDtype.compute returns float32"),
    (Narrow(width=16), r"one device: Narrow returns float32 \(8, 32, 1\), not"),
    (Mixes(), "one device: Mixes: a token changes other tokens, by"),
]


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("part", "message"),
    [(part, text) if text.startswith("one device") else slow(part, text) for part, text in WRONG],
    ids=[type(part).__name__ for part, _ in WRONG],
)
def test_what_is_wrong_is_named(part, message):
    with pytest.raises(CheckError, match=message):
        check(part, **ONE)


def test_what_is_no_component_and_too_few_devices(monkeypatch):
    with pytest.raises(ConfigError, match="takes a Mixer, a FeedForward or a Layer"):
        check(Mixer)
    monkeypatch.setattr(conformance, "start_devices", lambda *_: [None])
    with pytest.raises(ConfigError, match=r"check needs 4.*xla_force_host_platform_device_count"):
        check(Sine(width=16))
