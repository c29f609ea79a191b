"""What Gemma adds, alone and all at once: the plain model's loss and gradients on every mesh."""

import dataclasses
import functools
import math
from typing import Any

import pytest

from jaxpar.certification import distances, small_config, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Config, ConfigError, Experts, Glu, Layer, QkNorm, Rope, replace
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.slow import slow
from tests.tiny import ATTENTION, GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"model.num_layers": 4, "parallel.layer_loop": "unroll"})


def two_kinds(feed_forward: Glu = GLU, norms: Any = "before", **attention) -> dict[str, Any]:
    """Every second layer attends globally, with frequencies of its own."""
    wide = dataclasses.replace(ATTENTION, rope=Rope(theta=1e5), **attention)
    local = dataclasses.replace(wide, rope=Rope(theta=100.0), window=5)
    named = {"local": local, "layers": wide}
    return {"model.layers": [Layer(n, of, feed_forward, norms) for n, of in named.items()] * 2}


TWO_KINDS = two_kinds()
GELU = Glu(24, "gelu")
GEMMA = two_kinds(GELU, "around", scale_dim=6, qk_norm=QkNorm()) | {
    "model.norm.offset": True,
    "model.embed_scale": True,
    "model.tie_embeddings": True,
}
LOCAL, WIDE, *_ = GEMMA["model.layers"]

#: Norms only after the branches, of all heads of queries and keys.
OLMO3 = two_kinds(norms="after", qk_norm=QkNorm(over="all"))


def experts(number: int, expert: Glu, **fields: int) -> dict[str, Any]:
    of = Experts(expert=expert, num_experts=number, experts_per_token=2, **fields)
    return {"model.*.feed_forward": of}


CASES = [
    ("data=2,sequence=2,tensor=2", OLMO3 | {"model.num_layers": 2}),
    slow("pipeline=2,num_microbatches=2,zero=1,tensor=2", OLMO3),
    slow("data=2", OLMO3 | {"compute.dtype": "float32", "parallel.remat": "full"}),
    slow("data=2,tensor=2,row_groups=2", OLMO3 | {"model.num_layers": 2}),
    slow(
        "data=2,expert=2",
        OLMO3 | experts(4, GLU, num_shared_experts=1) | {"model.num_layers": 2},
    ),
    slow("data=2", {"model.layers": TWO_KINDS["model.layers"][:3]}),
    slow("pipeline=2,num_microbatches=2,zero=1", TWO_KINDS),
    slow("data=2,tensor=2", GEMMA | {"model.num_layers": 2}),
    # With the weights of seed 0, rounding moves a gradient by 1.7e-5 on one device.
    slow("sequence=2,tensor=2", GEMMA | experts(2, GELU) | {"train.seed": 1}),
    slow("data=2,tensor=2,row_groups=2", GEMMA),
    slow("tensor=2,layer_loop=scan", GEMMA | {"model.layers": [LOCAL] * 4}),
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
    plain = replace(cfg, **{"parallel.row_groups": 1})
    batch, wanted = reference_of(plain)
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


def test_shrinking_keeps_both_kinds():
    meshes = list(parse_meshes(["pipeline=2,num_microbatches=2"], BASE.parallel).values())
    small = small_config.shrink(
        replace(BASE, **GEMMA | {"model.layers": [LOCAL, LOCAL, WIDE]}), meshes
    )
    assert [layer.name for layer in small.model.layers] == ["local", "layers"] * 2
    check(replace(small, **{"parallel.layer_loop": "unroll"}))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"model.local.mixer.rope.theta": 0.0},
            r"model\.local\.mixer\.rope\.theta = 0\.0: must be above 0",
        ),
        ({"model.layers.mixer.scale_dim": 0}, r"layers\.mixer\.scale_dim = 0: must be at least 1"),
        ({"model.layers.norms": ""}, r"layers\.norms = '': must be one of before, after, around"),
        (
            {"model.num_layers": 2, "parallel.pipeline": 2, "parallel.num_microbatches": 2},
            r"model\.num_layers = 2: must be at least 3: 2 layers .*--model\.num-layers 4",
        ),
        (
            {"parallel.pipeline": 2, "parallel.layers_per_stage": (1, 3)},
            r"layers_per_stage = '1,3': must be multiples of .*--parallel\.layers-per-stage 2,2",
        ),
        (
            {"model.local.feed_forward.activation": "relu"},
            r"local\.feed_forward\.activation = 'relu': must be one of silu, gelu",
        ),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **TWO_KINDS | values))
