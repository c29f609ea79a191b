"""Text with drafts against text without, the rule of acceptance, and the modules' caches."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import Attention, LatentAttention, Layer, QkNorm, Router, replace
from jaxpar.config.validate import resolve
from jaxpar.inference import generation, speculative
from jaxpar.inference.options import Sampling
from jaxpar.inference.speculative import next_chances, num_accepted
from jaxpar.model import decode
from jaxpar.model.plain import decoder
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import init_state
from tests.extend.test_components import LAYERS, config
from tests.inference.test_generation import (
    ATTENTION,
    BASE,
    GREEDY,
    HEADS,
    LONGROPE,
    PROMPTS,
    texts,
)
from tests.slow import slow_but
from tests.tiny import EXPERTS, GLU

pytestmark = pytest.mark.usefixtures("quick_compile")

LATENT = LatentAttention(
    num_heads=4,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=6,
    kv_lora_rank=8,
    q_lora_rank=12,
)
LONG_LATENT = dataclasses.replace(
    LATENT, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=8, rope=LONGROPE
)
ROUTED = dataclasses.replace(
    EXPERTS, router=Router(score="sigmoid", balancing_bias=True), num_shared_experts=1
)
#: The modules have the last layer: a mixer of a user, which computes all tokens of a text again.
OF_COMPONENTS = [LAYERS["windows"][0], LAYERS["mean"][0]]
MODELS = {
    "longrope": {"model.layers.mixer.rope": LONGROPE, "model.mtp_depth": 2},
    "longrope of latents": {"model.layers.mixer": LONG_LATENT, "model.mtp_depth": 2},
    "one module": {"model.mtp_depth": 1},
    "latents": {"model.layers.mixer": LATENT, "model.mtp_depth": 2},
    "experts": {
        "model.layers": [Layer("dense_layers", ATTENTION, GLU), Layer("layers", ATTENTION, ROUTED)],
        "model.mtp_depth": 3,
    },
    "components": {"model": dataclasses.replace(config(*OF_COMPONENTS * 2).model, mtp_depth=2)},
    "window": {
        "model.layers.mixer": Attention(**HEADS, window=5, qk_norm=QkNorm()),
        "model.mtp_depth": 2,
    },
}


_PLAIN = [name for name in MODELS if "longrope" not in name]


@functools.cache
def model(name: str, tensor: int = 1):
    """A model whose modules are often right: its layers change little, and the modules less."""
    cfg = generation.config_for_sampling(replace(BASE, **MODELS[name]), tensor)
    cfg = resolve(cfg, tensor)
    mesh = make_mesh(cfg.parallel, jax.devices()[:tensor])
    params = jax.tree.map(np.asarray, init_state(cfg, mesh).params)
    shardings = jax.tree.map(lambda a: a.sharding, init_state(cfg, mesh).params)
    layers = [*cfg.model.layers, cfg.model.module_layer]
    for stack, layer in {layer.name: layer for layer in layers}.items():
        weights = layer.weights(cfg.model).items()
        for matrix in (name for name, weight in weights if weight.to_stream):
            params[stack][matrix] = params[stack][matrix] * 0.15
    join = 0.05 * params["mtp"]["w_join"]
    join[:, 0] += np.eye(cfg.model.d_model)
    params["mtp"]["w_join"] = join
    params = jax.device_put(params, shardings)
    weights = generation.weights_for_sampling(params, cfg, mesh, modules=True)
    return cfg, mesh, params, weights


def drafted(cfg, mesh, _, weights, prompts, how=GREEDY, max_tokens=24, stop=(), vocab_size=60):
    rows, drafts = [[] for _ in prompts], speculative.Drafts()
    for new in speculative.generate(
        *(weights, cfg, mesh, prompts, how),
        **{"max_tokens": max_tokens, "vocab_size": vocab_size, "stop": stop, "drafts": drafts},
    ):
        for row, ids in zip(rows, new, strict=True):
            row.extend(ids)
    return rows, drafts


@pytest.mark.parametrize(
    ("name", "tensor"),
    slow_but([("one module", 2)], itertools.product(_PLAIN, (1, 2))),
)
def test_greedy_text_is_that_without_drafts(name, tensor):
    """Rows of different lengths, of which some accept more than others."""
    found, drafts = drafted(*model(name, tensor), PROMPTS)
    assert found == texts(*model(name, tensor), PROMPTS)
    assert [len(row) for row in found] == [24] * len(PROMPTS)
    assert min(drafts.accepted, drafts.drafted - drafts.accepted) >= 10, drafts


@pytest.mark.slow  # quicker: greedy text, above; angles in test_rope.py
@pytest.mark.parametrize("name", ["longrope", "longrope of latents"])
def test_angles_of_longrope_change_where_they_do_without_drafts(name):
    """Rows that pass the original length at different times, one beginning at it, or beyond."""
    found, drafts = drafted(*model(name), PROMPTS)
    assert found == texts(*model(name), PROMPTS)
    most = decode.last_of_short_angles(model(name)[0].model)
    assert any(len(row) < most < len(row) + 24 for row in PROMPTS)
    assert min(drafts.accepted, drafts.drafted - drafts.accepted) >= 10, drafts


@pytest.mark.slow
def test_rows_end_where_they_do_without_drafts():
    name = "latents"
    whole, _ = drafted(*model(name), PROMPTS)
    stop = {whole[0][7]}
    assert drafted(*model(name), PROMPTS, stop=stop)[0] == texts(*model(name), PROMPTS, stop=stop)
    for count in (1, 5):
        short, _ = drafted(*model(name), PROMPTS, max_tokens=count)
        assert short == [row[:count] for row in whole]


@pytest.mark.slow
def test_drafts_are_those_of_the_plain_model():
    """After some rounds, with caches that held rejected drafts, as after the first."""
    cfg, mesh, params, weights = model("latents")
    size = {"slots": 128, "vocab_size": 60}
    made = speculative.make_programs(cfg, mesh, GREEDY, **size)
    tokens, lengths = generation.padded(PROMPTS)
    rows = made.start(weights, tokens, lengths)
    for _ in range(2):  # of several rounds each
        rows = made.go_on(weights, rows, lengths + 20)
    assert len({int(p) for p in rows.position - lengths}) > 1
    step = jax.shard_map(
        lambda weights, rows: speculative._drafted(
            jax.tree.map(lambda a: a[0], weights), rows, cfg, GREEDY, 60
        )[0],
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    text = np.asarray(jax.jit(step)(weights, rows))
    for row, p in zip(text, np.asarray(rows.position), strict=True):
        assert list(row[p + 1 : p + 3]) == plain_drafts(cfg, params, row[: p + 1])


def plain_drafts(cfg, params, text: np.ndarray) -> list[int]:
    """The modules' greedy drafts after a text: module by module, each over the whole text."""
    params, found = jax.device_get(params), []
    for k in range(cfg.model.mtp_depth):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(text) + k] = [*text, *found]
        place = np.arange(64, dtype=np.int32)[None]
        batch = Batch(row, row, np.ones_like(row), place)
        x, _ = decoder.hidden_and_routings(params, batch, cfg)
        h = next(itertools.islice(decoder.modules(params, x, batch, cfg), k, None))[1]
        logits = h[0, len(text) - 2] @ params["head"]
        found.append(int(jnp.argmax(logits[:60])))
    return found


def test_what_is_accepted_is_distributed_as_the_model():
    """By the chances themselves, not by counts."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6) * 0.4, 50), rng.dirichlet(np.ones(6) * 0.4, 50)
    target = np.stack((p, rng.dirichlet(np.ones(6), 50)), 1)
    steps = jnp.broadcast_to(jnp.linspace(0, 1, 1001)[:-1, None, None], (1000, 50, 1))
    for d in range(6):
        drafts = jnp.full((50, 1), d)
        counts = jax.vmap(lambda u, d=drafts: num_accepted(target, q[:, None], d, u))(steps)
        rate = np.mean(np.asarray(counts), axis=0)
        np.testing.assert_allclose(rate, np.minimum(1, p[:, d] / q[:, d]), atol=1.5e-3)
    accepted = (np.minimum(p, q)).sum(-1, keepdims=True)
    rest = np.array(next_chances(target, q[:, None], jnp.zeros(50, jnp.int32)))
    rest /= rest.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.minimum(p, q) + (1 - accepted) * rest, p, atol=1e-6)
    after_all = next_chances(target, q[:, None], jnp.ones(50, jnp.int32))
    np.testing.assert_allclose(after_all, target[:, 1], atol=1e-6)
    same = next_chances(target, target[:, :1], jnp.zeros(50, jnp.int32))
    np.testing.assert_allclose(same, target[:, 0], atol=1e-6)


@pytest.mark.slow
def test_texts_are_distributed_as_without_drafts():
    """2,048 texts of 3 tokens out of 4, against the chances by whole passes: chi-squared."""
    cfg, mesh, params, weights = model("latents")
    how, vocabulary, count = Sampling(temperature=6.0, top_k=0, top_p=0.95, seed=2), 4, 2048
    prompt = [1, 2, 1]
    found, drafts = drafted(
        *(cfg, mesh, params, weights, [prompt] * count, how),
        **{"max_tokens": 3, "vocab_size": vocabulary},
    )
    assert 0.1 < drafts.rate < 0.95
    next_logits = generation.make_next_logits(cfg, mesh)

    def after(text: tuple[int, ...]) -> np.ndarray:
        row = np.zeros((1, cfg.data.seq_len), np.int32)
        row[0, : 3 + len(text)] = [*prompt, *text]
        logits = next_logits(params, row, 2 + len(text))
        return np.asarray(generation.chances(logits, how, vocabulary))[0]

    expected = {(): 1.0}
    for _ in range(3):
        expected = {
            (*text, d): chance * of_d
            for text, chance in expected.items()
            for d, of_d in enumerate(after(text))
            if chance > 0
        }
    counts = {text: 0 for text in expected}
    for row in found:
        counts[tuple(row)] += 1
    assert all(counts[text] == 0 for text, chance in expected.items() if chance == 0)
    cells = [(counts[t], count * c) for t, c in expected.items() if count * c > 5]
    assert len(cells) > 15
    squares = sum((n - e) ** 2 / e for n, e in cells)
    assert squares < len(cells) + 3 * (2 * len(cells)) ** 0.5, (squares, len(cells))
