"""Attention within chunks, as in Llama 4: the plain model on every mesh, and the mask."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.layout.composition import model_of
from jaxpar.config.validate import check, resolve
from jaxpar.kernels.attention.mask import dense_mask
from jaxpar.model.attention_context import attention_context
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.verification import distances, traces
from jaxpar.verification.meshes import parse_meshes
from tests import weights
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(
    TINY,
    **{
        "model.attention_chunk": 5,
        "model.global_every": 2,
        "model.nope_every": 2,
        "model.nope_query_beta": 0.3,
        "model.nope_query_span": 4,
        "model.qk_norm": True,
        "model.qk_norm_gain": False,
        "parallel.layer_loop": "unroll",
    },
)
EXPERTS = {
    "model.num_experts": 4,
    "model.experts_per_token": 1,
    "model.normalize_experts": False,
    "model.num_shared_experts": 1,
    "model.router_score": "sigmoid",
    "model.router_scales_input": True,
    "train.balance_loss": 1e-2,
}
ALL_CHUNKS = {"model.global_every": 0, "model.nope_every": 0, "model.nope_query_beta": 0.0}
ALL_CHUNKS |= {"model.nope_query_span": 8192, "parallel.layer_loop": "scan"}

#: Dense layers between layers with experts.
BETWEEN = EXPERTS | {"model.moe_every": 2, "model.dense_layers": 2, "model.num_layers": 4}
BETWEEN |= {"model.dense_d_ff": 16, "model.global_every": 4, "model.nope_every": 4}

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
    mask, C = context.each[0].mask, cfg.model.attention_chunk
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
    cfg = replace(BASE, **ALL_CHUNKS, **{"data.seq_len": 40, "model.attention_chunk": 8})
    rows = jnp.arange(40)
    pairs = int(jnp.sum((rows[:, None] // 8 == rows // 8) & (rows[:, None] >= rows)))
    mixer = model_of(cfg.model).layers[0].mixer
    assert mixer is not None and mixer.num_pairs(40) == pairs - 40 / 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.attention_chunk": 1}, "attention_chunk = 1: must be at least 2"),
        ({"model.sliding_window": 4}, "replaces a sliding window, but .* is 4"),
        ({"model.attention_chunk": None}, "global_every = 2: needs a sliding window or chunks"),
        ({"model.qk_norm": False}, "qk_norm_gain = False: needs model.qk_norm True, not False"),
        ({"model.qk_norm_over": "all"}, "needs model.qk_norm_over head, not all"),
        ({"model.nope_every": 0}, "nope_query_beta = 0.3: needs model.nope_every"),
        ({"model.nope_query_beta": -0.1}, "must not be negative"),
        ({"model.nope_query_beta": 0.0}, "nope_query_span = 4: needs model.nope_query_beta"),
        (EXPERTS | {"model.experts_per_token": 2}, "router_scales_input = True: needs .* 1, not 2"),
        (BETWEEN | {"model.dense_layers": 1}, "dense_layers = 1: must be 2, the layers without"),
        (BETWEEN | {"model.moe_every": 8}, "leaves no layer with experts of model.num_layers = 4"),
        (
            BETWEEN | {"run.record_routing": "1"},
            "moe_every = 2: is not supported with run.record",
        ),
        ({"model.moe_every": 2}, "moe_every = 2: needs experts, but model.num_experts is 0"),
        ({"model.router_scales_input": True}, "needs experts, but model.num_experts is 0"),
    ],
)
def test_what_cannot_be(values, said):
    check(BASE)
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **values))
