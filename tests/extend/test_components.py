"""Components of a user's file on meshes, against their plain forms: a function of attention, a
mixer with weights of its own, a feed-forward."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import load_config
from jaxpar.certification import traces
from jaxpar.certification.distances import zero_gradients
from jaxpar.components.model import in_words, with_length
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.code import with_code
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import CONFIGS
from jaxpar.config.layers import with_classes_of
from jaxpar.config.serialize import from_json, to_json
from jaxpar.config.validate import check, resolve
from jaxpar.convert import torch_file
from jaxpar.extend import (
    Attention,
    Experts,
    FeedForward,
    Glu,
    Layer,
    Mixer,
    Mlp,
    Model,
    Rope,
    component,
    matrix,
    swap,
    vector,
)
from jaxpar.inference import generation
from jaxpar.inference.options import Sampling
from jaxpar.model import linear, lora
from jaxpar.model.parameters import specs_of
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_gradient_step
from tests.meshes.test_own_code import on_mesh
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")


@component
class DecayedMean(Mixer):
    """Each head adds up the values of its document so far, each with a weight that decays."""

    num_heads: int

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
        rate = 0.1 * jnp.exp(w["mean_rate"])[:, None, None]
        decay = jnp.where(seen[:, None], jnp.exp(-rate * back[:, None]), 0).astype(x.dtype)
        return jnp.einsum("bhts,bshk,hkd->btd", decay, v, w["mean_out"])


@component
class Sine(FeedForward):
    """Split over no axis: each tensor rank computes the same."""

    width: int

    def weights(self, model):
        up = matrix((model.d_model, self.width), ("embed", "rank"))
        down = matrix((self.width, model.d_model), ("rank", "embed"), to_stream=True)
        return {"sine_up": up, "sine_down": down}

    def compute(self, x, w, _):
        return jnp.sin(x @ w["sine_up"]) @ w["sine_down"]


@component
class Products(FeedForward):
    """Multiplies by `linear`, as components of jaxpar do: its matrices can have adapters."""

    width: int
    uses_products: ClassVar[bool] = True

    def weights(self, model):
        D, F, axes = model.d_model, self.width, ("embed", "mlp")
        down = matrix((F, D), axes[::-1], to_stream=True, adapter="sine_down")
        return {"sine_up": matrix((D, F), axes, adapter="sine_up"), "sine_down": down}

    def compute(self, x, w, _):
        (up,) = linear.products(x, [w["sine_up"]], "mlp_norm")
        up = lora.add(up, x, w, "sine_up")
        return linear.row_parallel(jnp.sin(up), w, "sine_down", "mlp_hidden")


@component
class Retention(Mixer):
    """Linear attention whose state decays, with what each head remembers of a text at first."""

    num_heads: int

    def weights(self, model):
        D, H = model.d_model, self.num_heads
        shape, axes = (D, H, D // H), ("embed", "heads", "head_dim")
        into = {f"ret_{n}": matrix(shape, axes, columns=2) for n in "qkv"}
        first = vector((H, D // H, D // H), ("heads", "head_dim", "latent"), "normal")
        return into | {
            "ret_decay": vector((H,), ("heads",), "zeros"),
            "ret_first": first,
            "ret_out": matrix((*shape[1:], D), (*axes[1:], "embed"), to_stream=True),
        }

    def init_state(self, rows, w):
        first = w["ret_first"].astype(jnp.float32)
        return {
            "kv": jnp.broadcast_to(first, (rows, *first.shape)),
            "n": jnp.zeros(rows, jnp.int32),
        }

    def step(self, x, w, state, positions):
        q, k, v = (jnp.einsum("bd,dhk->bhk", x, w[f"ret_{n}"]) for n in "qkv")
        kv = state["kv"] * self.decay(w)[:, None, None] + k[..., None] * v[:, :, None]
        y = jnp.einsum("bhk,bhkv->bhv", q, kv).astype(x.dtype)
        return jnp.einsum("bhv,hvd->bd", y, w["ret_out"]), {"kv": kv, "n": state["n"] + 1}

    def decay(self, w):
        return jax.nn.sigmoid(2.0 + w["ret_decay"].astype(jnp.float32))


@component
class FastRetention(Retention):
    """All tokens at once."""

    def compute(self, x, w, tokens):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[f"ret_{n}"]) for n in "qkv")
        back = tokens.positions[:, :, None] - tokens.positions[:, None]
        seen = (back >= 0) & (tokens.segments[:, :, None] == tokens.segments[:, None])
        decay = self.decay(w)[:, None, None] ** jnp.maximum(back, 0)[:, None]
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * jnp.where(seen[:, None], decay, 0)
        y = jnp.einsum("bhts,bshk->bthk", scores, v)
        since = self.decay(w) ** (tokens.positions[..., None] + 1.0)
        y += jnp.einsum("bthk,hkv->bthv", q, w["ret_first"].astype(x.dtype)) * since[..., None]
        return jnp.einsum("bthk,hkd->btd", y.astype(x.dtype), w["ret_out"])


@component
class Tempered(Attention):
    """Each head learns a factor of its queries, and one number is a factor of all values."""

    value_scale: float = 1.0

    def weights(self, model):
        own = {"temperature": vector((self.num_heads,), ("heads",), "ones")}
        return super().weights(model) | own

    def attending(self, q, k, v, w):
        return q * w["temperature"][:, None], k, v * self.value_scale


SIGMOID = load_config("sigmoid_attention").model.layers[0].mixer
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ATTENTION, OWN = Attention(**HEADS), type(SIGMOID)(**HEADS)


def config(*layers: Layer, **fields: Any) -> Config:
    m = TINY.model
    model = Model(d_model=m.d_model, vocab_size=m.vocab_size, layers=layers)
    return replace(TINY, **{"model": model} | fields)


LAYERS = {
    "sigmoid": [Layer("block", OWN, Glu(24))] * 2,
    "tempered": [Layer("block", Tempered(**HEADS, value_scale=3.0), Glu(24))] * 2,
    "deep": [Layer("block", OWN, Glu(24))] * 4,
    "windows": [
        Layer("local", Attention(**HEADS, window=5), Glu(24)),
        Layer("wide", Attention(**HEADS, rope=None), Sine(width=12)),
    ]
    * 2,
    "uneven": [  # a period of two, and a part of one
        Layer("local", Attention(**HEADS, window=5), Glu(24)),
        Layer("wide", Attention(**HEADS, rope=None), Sine(width=12)),
    ]
    * 3
    + [Layer("local", Attention(**HEADS, window=5), Glu(24))],
    "leading": [Layer("first", ATTENTION, Glu(40))]
    + [Layer("second", OWN, None)]
    + [
        Layer("routed", ATTENTION, Experts(expert=Glu(12), num_experts=4, experts_per_token=2)),
        Layer("block", DecayedMean(num_heads=4), Glu(24)),
    ]
    * 4,
    "parallel": [
        Layer("block", Attention(**HEADS, rope=None, bias=True), Mlp(24), parallel="own_norms"),
        Layer("shared", OWN, Glu(24), parallel="one_norm", scaled=True),
    ],
    "mean": [
        Layer("block", DecayedMean(num_heads=4), Sine(width=12)),
        Layer("attends", ATTENTION, Glu(24), norms="around"),
    ]
    * 2,
    "products": [Layer("block", OWN, Products(width=12), parallel="own_norms")] * 2,
    "steps": [Layer("steps", Retention(num_heads=4), Glu(24))] * 2,
    "retention": [
        Layer("fast", FastRetention(num_heads=4), Glu(24)),
        Layer("attends", OWN, Sine(width=12)),
    ]
    * 2,
    "experts": [
        Layer("block", DecayedMean(num_heads=4), Glu(24)),
        Layer("routed", OWN, Experts(expert=Glu(12), num_experts=4, experts_per_token=2)),
    ]
    * 2,
}

MESHES = [
    ("data=2,tensor=2", "mean"),
    slow("pipeline=2,tensor=2,num_microbatches=2", "sigmoid"),
    slow("data=2,tensor=2", "sigmoid"),
    slow("data=2,tensor=2", "retention"),  # quicker: text, below
    slow("sequence=2,data=2", "sigmoid"),
    slow("data=2,tensor=2", "tempered"),
    slow("sequence=2,tensor=2,context=ulysses", "tempered"),
    slow("pipeline=2,data=2,num_microbatches=2", "tempered"),
    slow("sequence=2,tensor=2", "steps"),
    slow("pipeline=2,data=2,num_microbatches=2", "steps"),
    slow("sequence=2,tensor=2", "mean"),
    slow("pipeline=2,data=2,num_microbatches=2", "mean"),
    slow("data=2,zero=1,num_microbatches=2,layer_loop=scan", "mean"),
    slow("tensor=2,row_groups=2,layer_loop=unroll", "windows"),
    slow("data=2,sequence=2", "windows"),
    slow("data=2,tensor=2", "products"),
    slow("pipeline=2,virtual_stages=2,num_microbatches=2", "deep"),
    slow("pipeline=2,virtual_stages=2,num_microbatches=2", "leading"),
    slow("pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll", "windows"),
    slow("pipeline=2,num_microbatches=2,layer_loop=scan", "leading"),
    slow("pipeline=2,num_microbatches=2,layer_loop=scan", "uneven"),
    slow("pipeline=2,tensor=2,num_microbatches=2", "uneven"),
    slow("pipeline=3,num_microbatches=2,layer_loop=unroll", "uneven"),
    slow("data=2,layer_loop=scan", "uneven"),
    slow("data=2,layer_loop=scan", "leading"),
    slow("data=2,tensor=2", "parallel"),
    slow("expert=2,tensor=2", "experts"),
    slow("expert=2,pipeline=2", "experts"),
    slow("expert=2,sequence=2", "experts"),
]


@functools.cache
def plain_gradients(name: str) -> tuple[float, dict[str, Any]]:
    cfg = config(*LAYERS[name])
    batch, params = traces.random_batch(cfg), traces.initial_params(specs_of(cfg), cfg.train.seed)
    found = jax.jit(lambda p: traces.reference_gradients(p, batch, cfg))(params)
    return float(found[0]), traces.to_host(found[1])


@pytest.mark.parametrize(("mesh", "name"), MESHES)
def test_gradients_on_a_mesh_are_those_of_the_plain_forms(mesh, name):
    wanted, cfg = plain_gradients(name), config(*LAYERS[name])
    here, devices = on_mesh(mesh, cfg)
    batch = traces.shard_batch(traces.random_batch(cfg), here, devices)
    metrics, grads = make_gradient_step(here, devices)(init_state(here, devices).params, batch)
    assert float(metrics["loss"]) == pytest.approx(wanted[0], rel=1e-5)
    zero, largest = zero_gradients(cfg.model), max(np.abs(a).max() for a in wanted[1].values())
    for path, value in traces.logical(grads, here).items():
        scale = np.abs(wanted[1][path]).max() if path not in zero else largest
        np.testing.assert_allclose(value, wanted[1][path], atol=2e-5 * scale, err_msg=path)


@pytest.mark.parametrize("name", LAYERS)
def test_a_composed_model_is_saved_and_read(name):
    cfg = config(*LAYERS[name])
    check(cfg)
    again = from_json(to_json(cfg))
    assert len(again.model.layers) == len(LAYERS[name])
    assert with_classes_of(again.model, cfg.model) == cfg.model
    if name == "windows":
        return
    with pytest.raises(ConfigError, match=r"code is not loaded.*add --code \S+\.py|--code"):
        check(again)


def test_a_method_of_attention_changes_what_it_computes():
    of = lambda **fields: config(Layer("block", Tempered(**HEADS, **fields), Glu(24)))  # noqa: E731
    losses = []
    for cfg in (of(), of(value_scale=3.0), config(Layer("block", ATTENTION, Glu(24)))):
        params = traces.initial_params(specs_of(cfg), cfg.train.seed)
        batch = traces.random_batch(cfg)
        losses.append(
            float(jax.jit(lambda p, b=batch, c=cfg: traces.reference_gradients(p, b, c))(params)[0])
        )
    # The temperature starts at 1: only the factor of values differs from attention as it is.
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)
    assert abs(losses[1] - losses[0]) > 1e-4
    (needs,) = torch_file.code_needed(of().model).values()
    assert "of torch_model.TorchAttention that defines attending(self, q, k, v, w)" in needs


@pytest.mark.parametrize(
    "name",
    ["retention", slow("tempered"), slow("mean"), slow("steps"), slow("sigmoid"), slow("windows")],
)
def test_text_is_that_of_whole_forwards(name):
    """With what mixers hold, or by all tokens again: the same likeliest tokens."""
    cfg = replace(config(*LAYERS[name]), **{"data.seq_len": 16})
    cfg = resolve(generation.config_for_sampling(cfg, 2), 2)
    mesh = make_mesh(cfg.parallel, jax.devices()[:2])
    params = init_state(cfg, mesh).params
    weights = generation.weights_for_sampling(params, cfg, mesh)
    whole = generation.make_next_logits(cfg, mesh)
    prompts, rows, greedy = [[5, 6, 7], [9, 8, 7, 6, 5]], [[], []], Sampling(temperature=0.0)
    how: dict[str, Any] = {"max_tokens": 6, "vocab_size": 60, "stop": ()}
    for new in generation.generate(weights, cfg, mesh, prompts, greedy, **how):
        for row, ids in zip(rows, new, strict=True):
            row.extend(ids)
    for prompt, text in zip(prompts, rows, strict=True):
        assert len(text) == 6
        for i, token in enumerate(text):
            row = np.zeros((1, 16), np.int32)
            row[0, : len(prompt) + i] = prompt + text[:i]
            assert token == int(jnp.argmax(whole(params, row, len(prompt) + i - 1)[0, :60]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mean", {"parallel.tensor": 8}, r"model\.block\.mixer\.num_heads = 4: must be divisible"),
        ("windows", {"parallel.tensor": 4}, r"model\.local\.mixer\.num_kv_heads = 2: must be"),
        ("products", {"parallel.row_groups": 2}, r"is not supported with parallel.row_groups"),
        ("experts", {"parallel.expert": 8}, r"model\.routed\.feed_forward\.num_experts = 4"),
    ],
)
def test_what_a_mesh_does_not_divide_names_the_component(name, options, message):
    cfg = replace(config(*LAYERS[name]), **{"data.seq_len": 48, "train.global_batch_size": 24})
    with pytest.raises(ConfigError, match=message) as error:
        check(replace(cfg, **options))
    assert "--" in error.value.fix


def test_a_part_of_a_model_is_exchanged():
    model = config(*LAYERS["windows"]).model
    found = swap(model, "wide.mixer", type(SIGMOID), shift=-2.0)
    sigmoid = type(SIGMOID)(**HEADS, rope=None, shift=-2.0)
    assert [layer.mixer for layer in found.layers[1::2]] == [sigmoid] * 2
    assert found.layers[::2] == model.layers[::2]
    everywhere = swap(found, "*.mixer", DecayedMean).layers
    assert {layer.mixer for layer in everywhere} == {DecayedMean(num_heads=4)}
    scaled = swap(model, "*.mixer.rope", Rope, theta=5.0).layers
    assert [layer.mixer.rope for layer in scaled] == [Rope(theta=5.0), None] * 2
    assert swap(model, "wide.mixer", None).layers[1].mixer is None
    experts = swap(config(*LAYERS["experts"]).model, "routed.feed_forward.expert", Glu, d_ff=8)
    assert experts.layers[1].feed_forward.expert == Glu(8)


def test_a_part_of_a_shipped_model_is_exchanged():
    model = load_config("quickstart").model
    found = swap(model, "layers.mixer", type(SIGMOID))
    assert [one.feed_forward for one in found.layers] == [one.feed_forward for one in model.layers]
    assert found.layers[0].mixer.num_heads == model.layers[0].mixer.num_heads
    check(replace(load_config("quickstart"), model=found))


@pytest.mark.parametrize(
    ("part", "component", "fields", "message"),
    [
        ("deep.mixer", Attention, {}, r"'deep\.mixer': is no part .*use one of local\.mixer, "),
        ("wide", Attention, {}, "is no part of the model"),
        ("wide.mixer.num_heads", Attention, {}, "is no part of the model"),
        ("wide.mixer", Attention, {"shift": 1.0}, "Attention has no field shift"),
        ("wide.feed_forward", Glu, {}, "Glu needs d_ff, which the old part has not"),
        ("wide.mixer", Glu, {"d_ff": 8}, "must be a Mixer"),
    ],
)
def test_what_cannot_be_exchanged(part, component, fields, message):
    with pytest.raises(ConfigError, match=message):
        found = swap(config(*LAYERS["windows"]).model, part, component, **fields)
        check(replace(config(*LAYERS["windows"]), model=found))


def test_the_file_of_a_run_brings_its_components_and_its_loss_back():
    cfg = load_config("sigmoid_attention")
    found = with_code(from_json(to_json(cfg)), [str(CONFIGS / "sigmoid_attention.py")])
    assert found == cfg and type(found.train.loss).__name__ == "focal"


def test_names_of_arrays_are_those_of_the_layers():
    specs = flat(specs_of(config(*LAYERS["mean"])))
    assert specs["block/mean_v"].shape == (2, TINY.model.d_model, 4, TINY.model.d_model // 4)
    assert {name.split("/")[0] for name in specs} >= {"block", "attends", "embed"}


def test_addresses_set_fields_of_layers():
    cfg = config(*LAYERS["windows"])
    wide = ["--model.*.mixer.num-heads", "8", "--model.local.mixer.window=7"]
    found = parse_overrides(cfg, wide).model.layers
    assert [layer.mixer.num_heads for layer in found] == [8] * 4
    assert [layer.mixer.window for layer in found] == [7, None] * 2
    assert len(parse_overrides(cfg, ["--model.num-layers", "6"]).model.layers) == 6


A, B, C = (Layer(name, ATTENTION, Glu(64)) for name in "abc")


@pytest.mark.parametrize(
    ("layers", "length", "words"),
    [
        ([A] * 2, 5, "a x 5"),
        ([A] + [B] * 4, 3, "a, b x 2"),
        ([A] + [B, B, C] * 2, 10, "a, (b x 2, c) x 3"),
        ([A] + [B, B, C] * 2, 4, "a, b x 2, c"),
        ([A, A, B] * 2, 9, "(a x 2, b) x 3"),
        ([A, B] * 2 + [A], 6, "(a, b) x 3"),
        ([A] * 6 + [B] * 18, 8, "a x 6, b x 2"),
        ([A, B, C], 6, "(a, b, c) x 2"),
        ([A] * 3 + [B], 8, "(a x 3, b) x 2"),
    ],
)
def test_a_length_repeats_or_cuts_what_repeats(layers, length, words):
    cfg = config(*layers)
    found = parse_overrides(cfg, ["--model.num-layers", str(length)]).model.layers
    assert len(found) == length and in_words(found) == words
    assert found[: len(layers)] == tuple(layers)[:length]
    back = parse_overrides(replace(cfg, model=cfg.model.with_layers(found)), [])
    assert with_length(back.model.layers, length) == found


@pytest.mark.parametrize(
    ("layers", "length", "near"),
    [
        ([A] + [B, B, C] * 2, 6, (4, 7)),
        ([A] + [B] * 4, 1, (2,)),
        ([A, B] * 2, 5, (4, 6)),
        ([A, B, C], 2, (3,)),
    ],
)
def test_a_length_between_periods_names_the_nearest(layers, length, near):
    cfg = config(*layers)
    ways = ", or ".join(f"--model.num-layers {n}" for n in near)
    with pytest.raises(ConfigError, match=f"num_layers = {length}: .*Fix: use {ways}\\.$"):
        parse_overrides(cfg, ["--model.num-layers", str(length)])
    for number in near:
        parse_overrides(cfg, ["--model.num-layers", str(number)])


def test_layers_may_be_named_layers():
    first = Layer("dense_layers", ATTENTION, Glu(64))
    cfg = config(first, Layer("layers", ATTENTION, Glu(32)))
    found = parse_overrides(cfg, ["--model.layers.feed-forward.d-ff", "16"]).model.layers
    assert found[0] == first and found[1].feed_forward.d_ff == 16


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model.local.mixer.num-head", "8", "num_head.*use --model.local.mixer.num-heads"),
        ("--model.block.mixer.num-heads", "8", "not a field of the config"),
        ("--model.local.mixer.num-heads", "many", "num_heads = 'many'.*must be"),
        ("--model.num-heads", "8", r"num_heads.*--model\.local\.mixer\.num-heads"),
        (
            "--model.num-layers",
            "3",
            "num_layers = 3.*of 2, .*use --model.num-layers 2, or .*-layers 4",
        ),
    ],
)
def test_wrong_addresses_are_refused(option, value, message):
    with pytest.raises(ConfigError, match=message):
        parse_overrides(config(*LAYERS["windows"]), [option, value])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Layer("embed", ATTENTION, None)], "embed.*no field of the model"),
        ([Layer("a", ATTENTION, None), Layer("a", None, Glu(8))], "one name, one value"),
        ([Layer("a", Glu(8), None)], "model.a.mixer.*must be a Mixer"),
        ([Layer("a", None, None)], "neither a mixer nor"),
        (["block"], "sequence of jaxpar.extend.Layer"),
    ],
)
def test_bad_layers_are_refused(layers, message):
    with pytest.raises(ConfigError, match=message):
        check(config(*layers))
