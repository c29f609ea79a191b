"""Functions from outside the package: on a mesh they are what they are on one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.config import Config, ConfigError, registry, replace
from jaxpar.config.validate import check, resolve
from jaxpar.convert.hf.config import why_not
from jaxpar.convert.hf.families import FAMILIES, LLAMA
from jaxpar.inference import generation
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.state import abstract_state, init_state
from jaxpar.verification import distances, traces
from jaxpar.verification.meshes import parse_meshes
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

ADDED = {"model.attention": "capped", "optimizer.name": "momentum"}


def capped(q, k, v, mask):
    """Softmax attention whose scores lie between -2 and 2."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = 2 * jnp.tanh(jnp.einsum("bthk,bshk->bhts", q, k) / 2)
    weights = jax.nn.softmax(scores, where=dense_mask(mask)[:, None], axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def momentum(cfg, rate, mask):
    return optax.chain(optax.trace(cfg.beta1), optax.scale_by_learning_rate(rate))


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setattr(registry, "_ADDED", {path: {} for path in registry.fields()})
    registry.add("model.attention", "capped", capped)
    registry.add("optimizer.name", "momentum", momentum)


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batches = [traces.random_batch(cfg, i) for i in range(2)]
    return batches, traces.reference_trace(cfg, batches, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "sequence=2",
        "sequence=2,tensor=2",
        "data=2,sequence=2,context=ulysses",
        "pipeline=2,data=2,num_microbatches=2,zero=1",
    ],
)
def test_meshes_compute_what_one_device_does(mesh, devices):
    cfg = replace(TINY, **ADDED)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batches, wanted = reference_of(cfg)
    found = traces.mesh_trace(on_mesh, make_mesh(parallel, devices[:n]), batches, 2)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


def root_of_sums(cfg, rate, mask):
    return optax.chain(optax.scale_by_rss(), optax.scale_by_learning_rate(rate))


@pytest.mark.slow  # quicker: optimizer/test_moments.py
def test_a_rule_with_a_moment_of_its_own_keeps_it_in_host_memory(devices):
    """Adagrad's sum of squares, which the package has no name for."""
    registry.add("optimizer.name", "adagrad", root_of_sums)
    one = {"model.num_layers": 1, "parallel.layer_loop": "unroll"}
    cfg = replace(TINY, **{"optimizer.name": "adagrad"} | one)
    batches, wanted = reference_of(cfg)
    cfg = resolve(replace(cfg, **{"optimizer.offload": True, "parallel.data": 1}), 1)
    mesh = make_mesh(cfg.parallel, devices[:1])
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(init_state(cfg, mesh).opt_state)}
    assert "pinned_host" in kinds
    found = traces.mesh_trace(cfg, mesh, batches, 2)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()
    said = r"optimizer\.first_moment_dtype = 'bfloat16': has no effect, because adagrad has no "
    with pytest.raises(ConfigError, match=said + "moment named mu or trace"):
        abstract_state(replace(cfg, **{"optimizer.first_moment_dtype": "bfloat16"}))


def of_two(cfg, rate, mask):
    """Adam for what is wide, Lion for the rest, each with moments of its own part alone."""
    label = functools.partial(jax.tree.map, lambda p: "wide" if p.ndim > 2 else "narrow")
    return optax.partition({"wide": optax.adam(rate), "narrow": optax.lion(rate)}, label)


@pytest.mark.slow
def test_a_rule_may_keep_moments_of_some_parameters(devices):
    registry.add("optimizer.name", "momentum", of_two)
    cfg = replace(TINY, **{"optimizer.name": "momentum", "parallel.layer_loop": "unroll"})
    batches = [traces.random_batch(cfg, i) for i in range(2)]
    wanted = traces.reference_trace(cfg, batches, 2)
    cfg = resolve(replace(cfg, **{"optimizer.offload": True, "parallel.data": 2}), 2)
    found = traces.mesh_trace(cfg, make_mesh(cfg.parallel, devices[:2]), batches, 2)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


def test_the_functions_are_used():
    both = reference_of(replace(TINY, **ADDED))[1].losses
    rule_alone = reference_of(replace(TINY, **{"optimizer.name": "momentum"}))[1].losses
    assert abs(both[0] - rule_alone[0]) > 1e-4  # attention
    rule = make_optimizer(replace(TINY, **ADDED).optimizer, 10, {})
    updates, _ = rule.update({"w": jnp.full(3, 2.0)}, rule.init({"w": jnp.zeros(3)}))
    np.testing.assert_allclose(updates["w"], -2.0 * TINY.optimizer.learning_rate, rtol=1e-6)


def test_adding_again_replaces():
    registry.add("model.attention", "capped", momentum)
    assert registry.function("model.attention", "capped").__wrapped__ is momentum
    assert registry.function("model.attention", "softmax") is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"optimizer.name": "momentun"},
            r"optimizer\.name = 'momentun': must be one of adamw, lion, sgd, muon, adafactor, or "
            r"registered with jaxpar\.config\.registry \(momentum\)",
        ),
        ({"model.attention": "momentum"}, r"must be one of softmax, or .* \(capped\)"),
        (
            ADDED | {"parallel.context": "ring", "parallel.sequence": 2},
            r"parallel\.context = 'ring': is not supported with model\.attention = capped",
        ),
        (
            ADDED | {"compute.attention_backend": "cudnn", "compute.dtype": "bfloat16"},
            r"compute\.attention_backend = 'cudnn': is not supported with",
        ),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(TINY, **{"model.head_dim": 64} | values))


def test_names_and_fields_that_are_taken_or_unknown():
    with pytest.raises(ConfigError, match=r"optimizer\.name = 'lion': is a built-in name"):
        registry.add("optimizer.name", "lion", momentum)
    with pytest.raises(ConfigError, match=r"'train\.seed': does not accept .*optimizer\.name"):
        registry.add("train.seed", "lucky", momentum)
    with pytest.raises(ConfigError, match=r"model\.attention = 'gone': is not registered"):
        registry.function("model.attention", "gone")


def test_what_is_no_function_is_not_added():
    said = r"optimizer\.name = 'none': is registered as None, not as a function"
    with pytest.raises(ConfigError, match=said):
        registry.add("optimizer.name", "none", None)
    assert "none" not in registry.names("optimizer.name")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda q, k, v, mask: (q, q), r"returns tuple instead of one array like q, float32 \("),
        (lambda q, k, v, mask: q[:, 1:], r"returns float32 \(.* instead of one array"),
        (lambda q, k, v, mask: q.astype("bfloat16"), r"returns bfloat16 \(.* instead of one array"),
    ],
    ids=["pair", "shape", "dtype"],
)
def test_attention_that_gives_something_else(function, said):
    registry.add("model.attention", "capped", function)
    cfg = replace(TINY, **{"model.attention": "capped"})
    with pytest.raises(ConfigError, match=r"model\.attention = 'capped': " + said):
        traces.reference_trace(cfg, [traces.random_batch(cfg, 0)], 1)


def test_a_rule_that_gives_nothing():
    registry.add("optimizer.name", "momentum", lambda cfg, rate, mask: None)
    said = r"optimizer\.name = 'momentum': returns NoneType instead of an optax"
    with pytest.raises(ConfigError, match=said):
        abstract_state(replace(TINY, **{"optimizer.name": "momentum"}))


def test_no_published_format_has_them():
    model = replace(TINY, **ADDED).model
    assert all(why_not(family, model) for family in FAMILIES)
    assert why_not(LLAMA, replace(TINY, **{"optimizer.name": "momentum"}).model) is None
    assert "model.layers.mixer.function = capped" in why_not(LLAMA, model)


def test_sampling_needs_the_attention_and_no_rule():
    cfg = generation.config_for_sampling(replace(TINY, **{"optimizer.name": "gone"}))
    check(cfg)
    with pytest.raises(ConfigError, match=r"model\.attention = 'gone'"):
        check(replace(cfg, **{"model.attention": "gone"}))


@pytest.mark.slow
def test_text_from_the_cache_is_that_of_whole_passes():
    cfg = resolve(generation.config_for_sampling(replace(TINY, **ADDED)), 1)
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    params = init_state(cfg, mesh).params
    weights = generation.weights_for_sampling(params, cfg, mesh)
    prompt, how = [3, 1, 4, 1, 5], generation.Sampling(temperature=0.0)
    made = generation.generate(
        weights, cfg, mesh, [prompt], how, max_tokens=12, vocab_size=48, stop=()
    )
    found = [token for new in made for token in new[0]]
    next_logits, text = generation.make_next_logits(cfg, mesh), list(prompt)
    for _ in range(12):
        row = np.zeros((1, cfg.data.seq_len), np.int32)
        row[0, : len(text)] = text
        text.append(int(jnp.argmax(next_logits(params, row, len(text) - 1)[0])))
    assert found == text[len(prompt) :]
