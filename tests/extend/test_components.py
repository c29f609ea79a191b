"""Components of a user's file on meshes, against their plain forms: a function of attention, a
mixer with weights of its own, a feed-forward."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import load_config
from jaxpar.config import Config, ConfigError, ModelConfig, replace
from jaxpar.config.code import with_code
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import CONFIGS
from jaxpar.config.layers import with_classes_of
from jaxpar.config.serialize import from_json, to_json
from jaxpar.config.validate import check, resolve
from jaxpar.extend import (
    Attention,
    Experts,
    FeedForward,
    Glu,
    Layer,
    Mixer,
    Model,
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
from jaxpar.verification import traces
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


SIGMOID = load_config("sigmoid_attention").model.layers[0].mixer
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ATTENTION, OWN = Attention(**HEADS), type(SIGMOID)(**HEADS)


def config(*layers: Layer, **fields: Any) -> Config:
    m = TINY.model
    model = Model(d_model=m.d_model, vocab_size=m.vocab_size, layers=layers, dtype="float32")
    return replace(TINY, **{"model": model} | fields)


LAYERS = {
    "sigmoid": [Layer("block", OWN, Glu(24))] * 2,
    "deep": [Layer("block", OWN, Glu(24))] * 4,
    "windows": [
        Layer("local", Attention(**HEADS, window=5), Glu(24)),
        Layer("wide", Attention(**HEADS, rope=None), Sine(width=12)),
    ]
    * 2,
    "mean": [
        Layer("block", DecayedMean(num_heads=4), Sine(width=12)),
        Layer("attends", ATTENTION, Glu(24), norms="around"),
    ]
    * 2,
    "products": [Layer("block", OWN, Products(width=12), parallel="own_norms")] * 2,
    "experts": [
        Layer("block", DecayedMean(num_heads=4), Glu(24)),
        Layer("routed", OWN, Experts(expert=Glu(12), num_experts=4, experts_per_token=2)),
    ]
    * 2,
}

MESHES = [
    ("data=2,tensor=2", "mean"),
    ("pipeline=2,tensor=2,num_microbatches=2", "sigmoid"),
    slow("data=2,tensor=2", "sigmoid"),
    slow("sequence=2,data=2", "sigmoid"),
    slow("sequence=2,tensor=2", "mean"),
    slow("pipeline=2,data=2,num_microbatches=2", "mean"),
    slow("data=2,zero=1,num_microbatches=2,layer_loop=scan", "mean"),
    slow("tensor=2,row_groups=2,layer_loop=unroll", "windows"),
    slow("data=2,sequence=2", "windows"),
    slow("data=2,tensor=2", "products"),
    slow("pipeline=2,virtual_stages=2,num_microbatches=2", "deep"),
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
    for path, value in traces.logical(grads, here).items():
        scale = np.abs(wanted[1][path]).max()
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


@pytest.mark.parametrize("name", ["mean", slow("sigmoid"), slow("windows")])
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
        ("products", {"parallel.row_groups": 2}, r"row_groups = 2: must be 1 with parallel layers"),
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
    found = swap(model, "wide", mixer=OWN)
    assert [layer.mixer for layer in found.layers[1::2]] == [OWN] * 2
    assert found.layers[::2] == model.layers[::2]
    with pytest.raises(ValueError, match="no layer is named deep; there are local, wide"):
        swap(model, "deep", mixer=OWN)


def test_the_file_of_a_run_brings_its_components_and_its_loss_back():
    cfg = load_config("sigmoid_attention")
    found = with_code(from_json(to_json(cfg)), [str(CONFIGS / "sigmoid_attention.py")])
    assert found == cfg and type(found.train.loss).__name__ == "focal"
    with pytest.raises(ConfigError, match=r"remove num_heads, which model\.layers says"):
        ModelConfig(layers=LAYERS["sigmoid"], num_heads=2)


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
        ("--model.num-heads", "8", r"num_heads = .*composed.*--model\.local\.mixer\.num-heads"),
        ("--model.num-layers", "3", "num_layers = 3.*multiple of 2.*use --model.num-layers 4"),
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
        check(replace(TINY, model=ModelConfig(d_model=32, vocab_size=64, layers=layers)))
