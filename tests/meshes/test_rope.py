"""Every kind of rotary embedding: the plain model's loss and gradients on every mesh."""

import math

import pytest

from jaxpar.config import RopeScaling, replace
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.verification import distances, small_config, traces
from jaxpar.verification.meshes import parse_meshes
from tests import weights
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(
    TINY, **{"model.num_layers": 4, "model.head_dim": 8, "parallel.layer_loop": "unroll"}
)

YARN = {
    "model.rope_scaling": RopeScaling(
        kind="yarn", factor=4.0, original_max_position=16, beta_fast=2.0, beta_slow=0.1
    ),
    "model.rope_theta": 1e3,
}
#: The shards of a sequence are shorter than the original context, the sequence is longer.
LONGROPE = {
    "model.rope_scaling": RopeScaling(
        kind="longrope",
        factor=4.0,
        original_max_position=20,
        short_factors="1,1",
        long_factors="1.5,4",
    ),
    "model.rope_fraction": 0.5,
}
NOPE = {"model.nope_every": 2, "model.rope_layout": "interleaved", "model.rope_fraction": 0.75}
KINDS = {
    "model.global_every": 2,
    "model.sliding_window": 5,
    "model.nope_every": 4,
    "model.local_rope_theta": 100.0,
    "model.local_rope_scaling": False,
}

#: Quicker for layers of two kinds in stages: Gemma 2 in test_families.py.
CASES = [
    slow("pipeline=2,num_microbatches=2,zero=1", NOPE),
    ("data=2,sequence=2,tensor=2", YARN | KINDS),
    slow("sequence=2,context=ring", LONGROPE),
    slow("sequence=2,context=ulysses", LONGROPE | NOPE | {"model.rope_fraction": 0.5}),
    slow("data=2,tensor=2,row_groups=2", NOPE | {"model.qk_norm": True}),
    slow("data=2,tensor=2,layer_loop=scan", YARN | {"model.rope_layout": "interleaved"}),
    slow("pipeline=2,num_microbatches=2,virtual_stages=2,zero=1", NOPE | {"model.num_layers": 8}),
]


@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_gradients(mesh, values, devices):
    cfg = replace(BASE, **values)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch = traces.random_batch(cfg, 0)
    wanted = weights.plain_gradients(replace(cfg, **{"parallel.row_groups": 1}), batch)
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


@pytest.mark.parametrize("values", [YARN | KINDS, LONGROPE, NOPE], ids=["yarn", "longrope", "nope"])
def test_shrinking_keeps_the_kind(values):
    meshes = list(parse_meshes(["pipeline=2,num_microbatches=2"], BASE.parallel).values())
    large = {"model.head_dim": 16 if values is NOPE else 8, "data.seq_len": 256}
    small = small_config.shrink(replace(BASE, **values | large), meshes)
    check(replace(small, **{"parallel.layer_loop": "unroll"}))
    assert small.model.nope_every == values.get("model.nope_every", 0)
    assert small.model.num_layers % 2 == 0
