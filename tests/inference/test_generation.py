"""Text by the cache against text by whole forward passes, row by row and mesh by mesh."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import small_config
from jaxpar.components.component import Mixer
from jaxpar.config import (
    Attention,
    ClampedSwiglu,
    Config,
    GatedDeltaNet,
    Glu,
    LatentAttention,
    Layer,
    Mamba2,
    Model,
    QkNorm,
    QueryGrowth,
    Rope,
    RopeScaling,
    replace,
)
from jaxpar.config.validate import resolve
from jaxpar.inference import generation
from jaxpar.inference.options import Sampling
from jaxpar.model import decode
from jaxpar.model.plain import decoder
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import init_state
from tests.slow import slow_but
from tests.tiny import EXPERTS, GLU

pytestmark = pytest.mark.usefixtures("quick_compile")

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ATTENTION = Attention(**HEADS)
BASE = replace(
    small_config.float32(Config()),
    **{
        "model": Model(
            d_model=16,
            vocab_size=64,
            layers=[Layer("layers", ATTENTION, GLU)] * 2,
            init_std=0.4,
        ),
        "data.seq_len": 64,
        "train.global_batch_size": 1,
    },
)

LONGROPE = Rope(
    scaling=RopeScaling(
        kind="longrope",
        original_max_position=16,
        short_factors=(1.0, 1.5, 1.0, 2.0),
        long_factors=(2.0, 3.0, 4.0, 9.0),
    )
)
YARN = Rope(
    fraction=0.5,
    layout="interleaved",
    scaling=RopeScaling(kind="yarn", original_max_position=8),
)
DELTA_NET = GatedDeltaNet(
    num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=6, chunk=5
)
MAMBA = Mamba2(num_heads=4, head_dim=6, state_size=4, num_groups=2, chunk=5)


def layers(first: Mixer, last: Mixer) -> dict:
    return {"model.layers": [Layer("first_layers", first, GLU), Layer("layers", last, GLU)]}


MODELS = {
    "llama": {},
    "window and biases": {
        "model.layers.mixer": Attention(**HEADS, window=5, bias=True, qk_norm=QkNorm())
    },
    "gemma": {
        "model.layers": [
            Layer("local", Attention(**HEADS, window=5, rope=Rope(theta=100.0)), GLU),
            Layer("layers", ATTENTION, GLU),
        ],
        "model.*.mixer.scale_dim": 6,
        "model.*.feed_forward.activation": "gelu",
        "model.*.norms": "around",
        "model.norm.offset": True,
        "model.embed_scale": True,
        "model.tie_embeddings": True,
    },
    "norms after": {
        "model.layers.norms": "after",
        "model.layers.mixer.qk_norm": QkNorm(over="all"),
    },
    "sinks": {"model.layers.mixer": Attention(**HEADS, window=5, bias=True, sinks=True)},
    "no rope in some layers": layers(Attention(**HEADS, rope=YARN), Attention(**HEADS, rope=None)),
    "chunks": layers(
        Attention(**HEADS, chunk=5),
        Attention(**HEADS, rope=None, growth=QueryGrowth(beta=0.3, span=4)),
    )
    | {"model.*.mixer.qk_norm": QkNorm(gain=False)},
    "experts": {
        "model.layers.feed_forward": EXPERTS,
        "model.*.feed_forward.expert": Glu(24, ClampedSwiglu(limit=1.0), bias=True),
        "model.*.feed_forward.router.linear_bias": True,
    },
    "recurrent": layers(DELTA_NET, Attention(**HEADS, gate=True)),
    "layers of one branch": {
        "model.layers": [
            Layer("mamba_layers", MAMBA, None),
            Layer("mlp_layers", None, GLU),
            Layer("layers", ATTENTION, None),
        ]
    },
}

#: The others are in these, or change less.
QUICK = [
    ("recurrent", 2),
    ("gemma", 2),
]

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8])
GREEDY = Sampling(temperature=0.0)


@functools.cache
def model(name: str, tensor: int = 1):
    cfg = resolve(generation.config_for_sampling(replace(BASE, **MODELS[name]), tensor), tensor)
    mesh = make_mesh(cfg.parallel, jax.devices()[:tensor])
    params = init_state(cfg, mesh).params
    return cfg, mesh, params, generation.weights_for_sampling(params, cfg, mesh)


def texts(cfg, mesh, _, weights, prompts, how=GREEDY, max_tokens=24, stop=()):
    rows = [[] for _ in prompts]
    for new in generation.generate(
        weights, cfg, mesh, prompts, how, max_tokens=max_tokens, vocab_size=60, stop=stop
    ):
        for row, ids in zip(rows, new, strict=True):
            row.extend(ids)
    return rows


@functools.cache
def greedy_by_whole_passes(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    cfg, mesh, params, _ = model(name)
    next_logits = generation.make_next_logits(cfg, mesh)
    text = list(prompt)
    for _ in range(count):
        row = np.zeros((1, cfg.data.seq_len), np.int32)
        row[0, : len(text)] = text
        text.append(int(jnp.argmax(next_logits(params, row, len(text) - 1)[0, :60])))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "tensor"),
    slow_but(QUICK, itertools.product(MODELS, (1, 2))),
)
def test_greedy_text_is_that_of_whole_passes(name, tensor):
    """Prompts of different lengths in one batch: each row is as if it were alone."""
    found = texts(*model(name, tensor), PROMPTS)
    assert found == [greedy_by_whole_passes(name, tuple(ids), 24) for ids in PROMPTS]
    assert len({tuple(row) for row in found}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixer",
    [
        Attention(**HEADS, rope=LONGROPE),
        LatentAttention(
            num_heads=4,
            qk_nope_head_dim=4,
            qk_rope_head_dim=8,
            v_head_dim=8,
            kv_lora_rank=8,
            rope=LONGROPE,
        ),
    ],
    ids=lambda mixer: type(mixer).__name__,
)
def test_angles_of_longrope_are_those_of_a_text_so_far(mixer):
    """Rows that pass the original length at different times, or never."""
    cfg = replace(BASE, **{"model.layers.mixer": mixer})
    cfg = resolve(generation.config_for_sampling(cfg), 1)
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    params = init_state(cfg, mesh).params
    weights = generation.weights_for_sampling(params, cfg, mesh)
    found = texts(cfg, mesh, params, weights, PROMPTS, max_tokens=14)
    plain = jax.device_get(params)
    for prompt, new in zip(PROMPTS, found, strict=True):
        for count, token in enumerate(new):
            text = np.array([[*prompt, *new[:count]]], np.int32)
            place = np.arange(text.shape[1], dtype=np.int32)[None]
            logits = decoder.logits_of(plain, text, place, place * 0, cfg.model)
            assert token == int(jnp.argmax(logits[0, -1, :60]))


@pytest.mark.parametrize("tensor", [1, 2])
def test_weights_are_kept_in_the_compute_dtype(tensor):
    cfg = replace(BASE, **{"compute.dtype": "bfloat16"})
    cfg = resolve(generation.config_for_sampling(cfg, tensor), tensor)
    mesh = make_mesh(cfg.parallel, jax.devices()[:tensor])
    weights = generation.weights_for_sampling(init_state(cfg, mesh).params, cfg, mesh)
    matrices = [w for w in jax.tree.leaves(weights) if w.ndim > 2]
    assert matrices and {str(w.dtype) for w in matrices} == {"bfloat16"}


def test_a_row_ends_at_a_stop_token():
    whole = texts(*model("llama"), PROMPTS)
    stop = {whole[0][5]}
    found = texts(*model("llama"), PROMPTS, stop=stop)
    for row, ids in zip(found, whole, strict=True):
        place = next((i for i, token in enumerate(ids) if token in stop), len(ids))
        assert row == ids[:place]
    assert len(found[0]) <= 5


@pytest.mark.slow
def test_draws_do_not_depend_on_the_neighbors_or_the_mesh():
    how = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)
    together = texts(*model("llama"), PROMPTS, how)
    assert texts(*model("llama"), PROMPTS[:1], how) == together[:1]
    assert texts(*model("llama", 2), PROMPTS, how) == together
    other = texts(*model("llama"), PROMPTS, dataclasses.replace(how, seed=4))
    assert other != together


@pytest.mark.parametrize("count", [1, 16, 17, 33])
def test_as_many_tokens_as_asked_for(count):
    long = texts(*model("llama"), PROMPTS, max_tokens=33)
    assert texts(*model("llama"), PROMPTS, max_tokens=count) == [row[:count] for row in long]


def drawn(how: Sampling, logits, n=4000) -> np.ndarray:
    """How often each token is drawn."""
    rows = jnp.broadcast_to(jnp.asarray(logits), (n, len(logits)))
    keys = jax.random.split(jax.random.key(0), n)
    ids = generation.draw(rows, keys, how, len(logits) - 1)
    return np.bincount(ids, minlength=len(logits)) / n


def test_temperature_top_k_and_top_p():
    """The last token is beyond the tokenizer's vocabulary, and never drawn."""
    chances = np.array([0.4, 0.3, 0.2, 0.1])
    logits = [*np.log(chances), 5.0]
    close = functools.partial(np.testing.assert_allclose, atol=0.03)
    close(drawn(Sampling(temperature=1.0, top_k=0), logits), [*chances, 0])
    close(drawn(Sampling(temperature=1.0, top_k=2), logits), [4 / 7, 3 / 7, 0, 0, 0])
    nucleus = Sampling(temperature=1.0, top_k=0, top_p=0.65)
    close(drawn(nucleus, logits), [4 / 7, 3 / 7, 0, 0, 0])
    close(drawn(Sampling(temperature=1.0, top_k=0, top_p=1e-9), logits), [1, 0, 0, 0, 0])
    cold = chances**2 / (chances**2).sum()
    close(drawn(Sampling(temperature=0.5, top_k=0), logits), [*cold, 0])
    assert drawn(GREEDY, logits)[0] == 1


@pytest.mark.parametrize("temperature", [1e-42, 1e-38, 1e-30, 1e-20])
def test_next_to_no_temperature_is_none(temperature):
    """Of float32, the first is 0, and by the second 20 is too large to be divided."""
    logits = [10.0, 15.0, 20.0, 3.0, 25.0]
    found = drawn(Sampling(temperature=temperature), logits, 8)
    np.testing.assert_array_equal(found, [0, 0, 1, 0, 0])


@pytest.mark.parametrize(("name", "tensor"), [("llama", 1), ("llama", 2), ("recurrent", 2)])
def test_the_cache_is_as_large_as_it_is_said_to_be(name, tensor):
    cfg, mesh, _, weights = model(name, tensor)
    programs = generation.make_programs(cfg, mesh, GREEDY, slots=128, vocab_size=60)
    tokens, lengths, number = np.ones((3, 128)), np.full(3, 5), np.arange(3)
    rows = programs.start(weights, *(a.astype(np.int32) for a in (tokens, lengths, number)))
    held = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(rows.cache))
    assert held == decode.cache_bytes(cfg, 3, 128, tensor)
