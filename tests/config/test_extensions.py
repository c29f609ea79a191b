"""Attention and update rules of a user: on a mesh they are what they are on one device."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.validate import check, resolve
from jaxpar.convert.hf.config import why_not
from jaxpar.convert.hf.families import FAMILIES, LLAMA
from jaxpar.extend import Attention, UpdateRule, component, swap
from jaxpar.inference import generation
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.state import abstract_state, init_state
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5


def capped(q, k, v, mask):
    """Softmax attention whose scores lie between -2 and 2."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = 2 * jnp.tanh(jnp.einsum("bthk,bshk->bhts", q, k) / 2)
    weights = jax.nn.softmax(scores, where=dense_mask(mask)[:, None], axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


@component
class Capped(Attention):
    """Attention with other heads."""

    function: Callable = capped

    def heads(self, q, k, v, mask):
        return self.function(q, k, v, mask)


class Own(UpdateRule):
    """The rule that a function makes."""

    function: Callable

    def __call__(self, cfg, rate, mask):
        return self.function(cfg, rate, mask)


def momentum(cfg, rate, mask):
    return optax.chain(optax.trace(cfg.beta1), optax.scale_by_learning_rate(rate))


RULE = {"optimizer.name": Own(function=momentum)}
ADDED = {"model": swap(TINY.model, "layers.mixer", Capped)} | RULE


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
    one = {"model.num_layers": 1, "parallel.layer_loop": "unroll"}
    cfg = replace(TINY, **{"optimizer.name": Own(function=root_of_sums)} | one)
    batches, wanted = reference_of(cfg)
    cfg = resolve(replace(cfg, **{"optimizer.offload": True, "parallel.data": 1}), 1)
    mesh = make_mesh(cfg.parallel, devices[:1])
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(init_state(cfg, mesh).opt_state)}
    assert "pinned_host" in kinds
    found = traces.mesh_trace(cfg, mesh, batches, 2)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()
    said = r"optimizer\.first_moment_dtype = 'bfloat16': has no effect, because Own has no "
    with pytest.raises(ConfigError, match=said + "moment named mu or trace"):
        abstract_state(replace(cfg, **{"optimizer.first_moment_dtype": "bfloat16"}))


def of_two(cfg, rate, mask):
    """Adam for what is wide, Lion for the rest, each with moments of its own part alone."""
    label = functools.partial(jax.tree.map, lambda p: "wide" if p.ndim > 2 else "narrow")
    return optax.partition({"wide": optax.adam(rate), "narrow": optax.lion(rate)}, label)


@pytest.mark.slow
def test_a_rule_may_keep_moments_of_some_parameters(devices):
    rule = Own(function=of_two)
    cfg = replace(TINY, **{"optimizer.name": rule, "parallel.layer_loop": "unroll"})
    batches = [traces.random_batch(cfg, i) for i in range(2)]
    wanted = traces.reference_trace(cfg, batches, 2)
    cfg = resolve(replace(cfg, **{"optimizer.offload": True, "parallel.data": 2}), 2)
    found = traces.mesh_trace(cfg, make_mesh(cfg.parallel, devices[:2]), batches, 2)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


@pytest.mark.slow
def test_the_functions_are_used():
    both = reference_of(replace(TINY, **ADDED))[1].losses
    rule_alone = reference_of(replace(TINY, **RULE))[1].losses
    assert abs(both[0] - rule_alone[0]) > 1e-4  # attention
    rule = make_optimizer(replace(TINY, **ADDED).optimizer, 10, {})
    updates, _ = rule.update({"w": jnp.full(3, 2.0)}, rule.init({"w": jnp.zeros(3)}))
    np.testing.assert_allclose(updates["w"], -2.0 * TINY.optimizer.learning_rate, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"optimizer.name": "momentun"},
            r"optimizer\.name = 'momentun': must be one of adamw, lion, sgd, muon, adafactor",
        ),
        (
            ADDED | {"parallel.context": "ring", "parallel.sequence": 2},
            r"parallel\.context = 'ring': is not supported with model\.layers\.mixer = Capped",
        ),
        (
            ADDED | {"compute.attention_backend": "cudnn", "compute.dtype": "bfloat16"},
            r"compute\.attention_backend = 'cudnn': is not supported with",
        ),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(TINY, **values | {"model.layers.mixer.head_dim": 64}))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda q, k, v, mask: (q, q), r"returns tuple in place of an array as its queries"),
        (lambda q, k, v, mask: q[:, 1:], r"returns float64 \(.* in place of an array"),
        (lambda q, k, v, mask: q.astype("bfloat16"), r"returns bfloat16 \(.* in place of an array"),
    ],
    ids=["pair", "shape", "dtype"],
)
def test_attention_that_gives_something_else(function, said):
    cfg = replace(TINY, model=swap(TINY.model, "layers.mixer", Capped, function=function))
    with pytest.raises(ConfigError, match=r"Capped\.heads = 'Capped': " + said):
        traces.reference_trace(cfg, [traces.random_batch(cfg, 0)], 1)


def test_a_rule_that_gives_nothing():
    said = r"optimizer\.name = 'Own': returns NoneType instead of an optax"
    with pytest.raises(ConfigError, match=said):
        abstract_state(replace(TINY, **{"optimizer.name": Own(function=lambda *_: None)}))


def test_no_published_format_has_them():
    model = replace(TINY, **ADDED).model
    assert all(why_not(family, model) for family in FAMILIES)
    assert why_not(LLAMA, replace(TINY, **RULE).model) is None
    assert "Capped" in why_not(LLAMA, model)


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
