"""Every kind of rotary embedding: the plain model's loss and gradients on every mesh."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from jaxpar.certification import distances, small_config, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Layer, QkNorm, Rope, RopeScaling, replace
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.tiny import ATTENTION, GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"parallel.layer_loop": "unroll"})


def layer(name: str, rope: Rope | None, **attention: Any) -> Layer:
    of = {"rope": rope, "head_dim": 8} | attention
    return Layer(name, dataclasses.replace(ATTENTION, **of), GLU)


YARN = Rope(
    theta=1e3,
    scaling=RopeScaling(
        kind="yarn", factor=4.0, original_max_position=16, beta_fast=2.0, beta_slow=0.1
    ),
)
#: The shards of a sequence are shorter than the original context, the sequence is longer.
LONGROPE = Rope(
    fraction=0.5,
    scaling=RopeScaling(
        kind="longrope",
        factor=4.0,
        original_max_position=20,
        short_factors=(1.0, 1.0),
        long_factors=(1.5, 4.0),
    ),
)
PARTLY = Rope(layout="interleaved", fraction=0.75)


def with_nope(rope: Rope, **attention: Any) -> list[Layer]:
    return [layer("layers", rope, **attention), layer("nope_layers", None, **attention)]


LOCAL = layer("local_layers", Rope(theta=100.0), window=5)
WIDE, NOPE = with_nope(YARN)
KINDS = [LOCAL, WIDE, LOCAL, NOPE]
NEIGHBORS = {"layout": "interleaved"}

CASES = [
    ("pipeline=2,num_microbatches=2,zero=1", with_nope(PARTLY) * 2),
    ("data=2,sequence=2,tensor=2", KINDS),
    ("sequence=2,context=ring", [layer("layers", LONGROPE)] * 4),
    ("sequence=2,context=ulysses", with_nope(dataclasses.replace(LONGROPE, **NEIGHBORS)) * 2),
    ("data=2,tensor=2,row_groups=2", with_nope(PARTLY, qk_norm=QkNorm()) * 2),
    (
        "data=2,tensor=2,layer_loop=scan",
        [layer("layers", dataclasses.replace(YARN, **NEIGHBORS))] * 4,
    ),
    ("pipeline=2,num_microbatches=2,virtual_stages=2,zero=1", with_nope(PARTLY) * 4),
]


@pytest.mark.slow  # quicker: convert/test_goldens.py; sequences, test_chunks.py
@pytest.mark.parametrize(("mesh", "layers"), CASES)
def test_gradients(mesh, layers, devices):
    cfg = replace(BASE, **{"model.layers": layers})
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch = traces.random_batch(cfg, 0)
    wanted = weights.plain_gradients(replace(cfg, **{"parallel.row_groups": 1}), batch)
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


@pytest.mark.parametrize(
    "layers",
    [KINDS, [layer("layers", LONGROPE)] * 4, with_nope(PARTLY, head_dim=16) * 2],
    ids=["yarn", "longrope", "nope"],
)
def test_shrinking_keeps_the_kind(layers):
    meshes = list(parse_meshes(["pipeline=2,num_microbatches=2"], BASE.parallel).values())
    large = replace(BASE, **{"model.layers": layers, "data.seq_len": 256})
    small = small_config.shrink(large, meshes)
    check(replace(small, **{"parallel.layer_loop": "unroll"}))
    period, found = large.model.layers, small.model.layers
    assert len(found) % 2 == 0
    for layer_of, now in zip(itertools.cycle(period), found, strict=False):
        assert now.name == layer_of.name
        assert (now.mixer.rope is None) == (layer_of.mixer.rope is None)
