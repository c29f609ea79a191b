"""Attention within chunks, as in Llama 4: the plain model on every mesh, and the mask."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import (
    Config,
    ConfigError,
    Experts,
    Glu,
    Layer,
    QkNorm,
    QueryGrowth,
    Router,
    replace,
)
from jaxpar.config.validate import check, resolve
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.model.attention_context import attention_context
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.slow import slow
from tests.tiny import ATTENTION, GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

CHUNKED = dataclasses.replace(ATTENTION, chunk=5, qk_norm=QkNorm(gain=False))
GLOBAL = dataclasses.replace(CHUNKED, chunk=None, rope=None, growth=QueryGrowth(beta=0.3, span=4))

OF_EXPERTS = Experts(
    expert=GLU,
    num_experts=4,
    experts_per_token=1,
    router=Router(score="sigmoid", normalize=False, scales_input=True),
    num_shared_experts=1,
)


def in_turn(feed_forward) -> list[Layer]:
    """A layer of each kind."""
    return [Layer("layers", CHUNKED, feed_forward), Layer("global_layers", GLOBAL, feed_forward)]


BASE = replace(TINY, **{"model.layers": in_turn(GLU), "parallel.layer_loop": "unroll"})
EXPERTS = {"model.layers": in_turn(OF_EXPERTS), "train.balance_loss": 1e-2}
ALL_CHUNKS = {"model.layers": in_turn(GLU)[:1] * 2, "parallel.layer_loop": "scan"}

#: Dense layers between layers with experts.
DENSE = Layer("dense_layers", CHUNKED, Glu(16))
LOCAL, WIDE = in_turn(OF_EXPERTS)
BETWEEN = EXPERTS | {"model.layers": [DENSE, LOCAL, DENSE, WIDE]}

CASES = [
    ("sequence=2,tensor=2,context=ulysses", {}),
    slow("sequence=2,tensor=2,context=ring", {}),
    slow("data=2,sequence=2", {"data.document_mask": False}),
    slow("data=2,sequence=4", ALL_CHUNKS),
    slow("data=2,tensor=2,row_groups=2", EXPERTS),
    slow("expert=2,sequence=2,tensor=2", EXPERTS),
    slow("expert=2,tensor=2", BETWEEN),
    slow("data=2,num_microbatches=2,zero=2", BETWEEN),
]


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_gradients(mesh, values, devices):
    cfg = replace(BASE, **values)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch, wanted = reference_of(cfg)
    assert (batch.segment_ids.max() > 1) == cfg.data.document_mask
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


@pytest.mark.parametrize("documents", [True, False])
def test_segments_are_chunks_numbered_from_one(documents):
    """As cuDNN's offsets need them: consecutive, and at most `max_segments`."""
    cfg = replace(BASE, **{"data.document_mask": documents})
    batch, at_most = traces.random_batch(cfg, 0), 6
    assert batch.segment_ids.max() <= at_most or not documents
    context = attention_context(batch, cfg, at_most)
    mask, C = context.each[0].mask, CHUNKED.chunk
    place, of = np.asarray(batch.positions), np.asarray(batch.segment_ids)
    same = place[:, :, None] // C == place[:, None, :] // C
    seen = same & (place[:, :, None] >= place[:, None, :])
    seen &= (of[:, :, None] == of[:, None, :]) | (not documents)
    np.testing.assert_array_equal(dense_mask(mask), seen)
    steps = np.diff(np.asarray(mask.q_segments), axis=1)
    assert mask.in_order and set(np.unique(steps)) <= {0, 1}
    assert (np.asarray(mask.q_segments)[:, 0] == 1).all()
    assert mask.q_segments.max() <= mask.max_segments
    everywhere = context.each[1]
    assert everywhere.mask.max_segments == at_most and everywhere.chunk is None


def test_pairs_of_chunks():
    """The planner's count, of chunks that divide a sequence, without the diagonal's halves."""
    rows = jnp.arange(40)
    pairs = int(jnp.sum((rows[:, None] // 8 == rows // 8) & (rows[:, None] >= rows)))
    assert dataclasses.replace(CHUNKED, chunk=8).num_pairs(40) == pairs - 40 / 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.layers.mixer.chunk": 1}, "layers.mixer.chunk = 1: must be at least 2"),
        ({"model.layers.mixer.window": 4}, "replaces a sliding window, but .* is 4"),
        ({"model.*.mixer.qk_norm.over": "all"}, "over = 'all': needs a gain"),
        ({"model.global_layers.mixer.growth.span": 0}, "growth.span = 0: must be at least 1"),
        (
            {"model.layers.mixer.growth": QueryGrowth(beta=0.3)},
            "is for layers without a rotary embedding",
        ),
        (
            EXPERTS | {"model.*.feed_forward.experts_per_token": 2},
            "router.scales_input = True: needs .* 1, not 2",
        ),
    ],
)
def test_what_cannot_be(values, said):
    check(BASE)
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **values))
