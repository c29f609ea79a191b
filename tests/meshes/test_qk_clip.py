"""QK-clip: logits, weights and losses are those of the plain model on every mesh."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxpar.certification import distances, small_config, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.certification.traces import max_segments
from jaxpar.config import Attention, Config, Glu, Layer, Model, replace
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import specs_of
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.features.qk_clip import largest_logits, plainly_clipped
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_train_step
from tests import weights
from tests.meshes.test_latent_attention import DENSE, NO_QUERY_LATENT, V3
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE, STEPS = 1e-5, 2

BASE = replace(small_config.steady(TINY), **{"optimizer.learning_rate": 1e-2})

MUON = {"optimizer.name": "muon"}
FOUR = {"model.num_layers": 4}
BIAS = {"model.layers.mixer.bias": True}
#: A composed model with layers of two names, and one that comes before those that repeat.
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LOCAL = Layer("local", Attention(**SIZES, window=5), Glu(24))
WIDE = Layer("wide", Attention(**SIZES, rope=None), Glu(24))
FIRST = Layer("first", Attention(**SIZES), Glu(40))


def composed(*layers: Layer) -> dict:
    m = TINY.model
    return {"model": Model(d_model=m.d_model, vocab_size=m.vocab_size, layers=layers)}


NAMED = composed(*[LOCAL, WIDE] * 4)
DEEPSEEK = DENSE | {"parallel.layer_loop": "unroll"}

CASES = [
    ("sequence=2,tensor=2,context=ring", {}),
    slow("pipeline=2,num_microbatches=2,sequence=2,tensor=2,layer_loop=unroll", MUON),
    slow("pipeline=2,num_microbatches=2,virtual_stages=2", NAMED),
    slow("data=2,tensor=2,layer_loop=unroll", composed(FIRST, *[LOCAL, WIDE] * 2)),
    slow("data=1", BIAS),
    slow("sequence=4,context=ring", {"model.layers.mixer.window": 9}),
    slow("sequence=2,tensor=2,context=ulysses", {"data.document_mask": False}),
    slow("data=2,num_microbatches=2,zero=2,layer_loop=unroll", BIAS),
    slow("data=2,tensor=2,row_groups=2,layer_loop=unroll", MUON),
    slow("replica=2,data=2,num_microbatches=2,zero=1,layer_loop=unroll", {}),
    slow("pipeline=2,num_microbatches=4,zero=1,schedule=zero_bubble,layer_loop=unroll", FOUR),
    slow("pipeline=2,num_microbatches=2,virtual_stages=2,pipeline_save=inputs", FOUR),
    slow("pipeline=2,num_microbatches=2,layers_per_stage=3,1", FOUR),
    slow("pipeline=2,num_microbatches=2,schedule=gpipe,data=2", FOUR),
    slow("data=2,sequence=2,tensor=2,layer_loop=unroll", V3 | NO_QUERY_LATENT),
    slow("pipeline=2,num_microbatches=2,tensor=2,layer_loop=unroll", V3 | MUON),
    slow("data=2,expert=2,tensor=2,layer_loop=unroll", DEEPSEEK | MUON),
]


@functools.cache
def initial(cfg: Config):
    """Initial parameters, and the largest logits of the first batch there."""
    params = weights.values_of(tuple(flat(specs_of(cfg)).items()), cfg.train.seed)
    batch = traces.random_batch(cfg, 0)
    return params, np.asarray(jax.jit(lambda p: largest_logits(p, batch, cfg))(params))


def limited(values: dict) -> Config:
    """The config with a limit that half of the heads exceed."""
    cfg = replace(BASE, **values)
    sizes = np.sort(initial(cfg)[1].ravel())
    middle = len(sizes) // 2
    return replace(cfg, **{"optimizer.qk_clip": float(sizes[middle - 1 : middle + 1].mean())})


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batches = [traces.random_batch(cfg, i) for i in range(STEPS)]
    return batches, traces.reference_trace(cfg, batches, STEPS)


@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_steps(mesh, values, devices):
    cfg = limited(values)
    (parallel,) = parse_meshes([mesh], cfg.parallel).values()
    n = math.prod(axis_sizes(parallel))
    there, here = resolve(replace(cfg, parallel=parallel), n), make_mesh(parallel, devices[:n])
    (batches, wanted), (_, largest) = reference_of(cfg), initial(replace(BASE, **values))
    found = traces.mesh_trace(there, here, batches, STEPS)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()
    placed = traces.shard_batch(batches[0], there, here)
    step = make_train_step(there, here, max_segments(there))  # compiled above
    _, measured = step(init_state(there, here), placed)
    assert measured["max_attention_logit"] == pytest.approx(largest.max(), rel=TOLERANCE)
    assert measured["clipped_heads"] == largest.size // 2


@pytest.mark.parametrize(
    "values", [{}, {"model.layers.mixer.num_kv_heads": 4}, V3, V3 | NO_QUERY_LATENT]
)
def test_a_clipped_head_has_the_limit_as_its_largest_logit(values):
    """And other heads keep theirs, though they share keys. Without biases, of the same batch."""
    cfg = limited(values | {"model.num_layers": 1})
    params, before = initial(replace(cfg, **{"optimizer.qk_clip": 0.0}))
    batch, limit = traces.random_batch(cfg, 0), cfg.optimizer.qk_clip
    after = jax.jit(lambda p: largest_logits(plainly_clipped(p, before, cfg), batch, cfg))(params)
    assert (before > limit).sum() == before.size // 2
    np.testing.assert_allclose(after, np.minimum(before, limit), rtol=1e-5)
