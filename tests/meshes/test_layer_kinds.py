"""What Gemma adds, alone and all at once: the plain model's loss and gradients on every mesh."""

import functools
import math

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.verification import distances, small_config, traces
from jaxpar.verification.meshes import parse_meshes
from tests import weights
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"model.num_layers": 4, "parallel.layer_loop": "unroll"})

TWO_KINDS = {
    "model.global_every": 2,
    "model.sliding_window": 5,
    "model.rope_theta": 1e5,
    "model.local_rope_theta": 100.0,
}
GEMMA = TWO_KINDS | {
    "model.activation": "gelu",
    "model.post_norms": True,
    "model.norm_offset": True,
    "model.embed_scale": True,
    "model.query_scale_dim": 6,
    "model.qk_norm": True,
    "model.tie_embeddings": True,
}

#: Norms only after the branches, of all heads of queries and keys.
OLMO3 = TWO_KINDS | {
    "model.pre_norms": False,
    "model.post_norms": True,
    "model.qk_norm": True,
    "model.qk_norm_over": "all",
}

CASES = [
    ("data=2,sequence=2,tensor=2", OLMO3 | {"model.num_layers": 2}),
    slow("pipeline=2,num_microbatches=2,zero=1,tensor=2", OLMO3),
    slow("data=2", OLMO3 | {"compute.dtype": "float32", "parallel.remat": "full"}),
    slow("data=2,tensor=2,row_groups=2", OLMO3 | {"model.num_layers": 2}),
    slow(
        "data=2,expert=2",
        OLMO3 | {"model.num_experts": 4, "model.num_shared_experts": 1, "model.num_layers": 2},
    ),
    slow("data=2", TWO_KINDS | {"model.num_layers": 3}),
    # Quicker: Gemma 2 in test_families.py, on such a mesh.
    slow("pipeline=2,num_microbatches=2,zero=1", TWO_KINDS),
    slow("data=2,tensor=2", GEMMA | {"model.num_layers": 2}),
    slow("sequence=2,tensor=2", GEMMA | {"model.num_experts": 2}),
    slow("data=2,tensor=2,row_groups=2", GEMMA),
    slow(
        "tensor=2,layer_loop=scan",
        GEMMA | {"model.global_every": 0, "model.local_rope_theta": None},
    ),
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
    small = small_config.shrink(replace(BASE, **GEMMA | {"model.global_every": 3}), meshes)
    assert small.model.num_layers == 6
    check(replace(small, **{"parallel.layer_loop": "unroll"}))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.global_every": -1}, r"model\.global_every = -1: must not be negative"),
        ({"model.global_every": 1}, r"model\.global_every = 1: leaves no sliding-window layer"),
        (
            {"model.sliding_window": None},
            r"global_every = 2: .*model\.sliding_window and .* are None",
        ),
        ({"model.global_every": 0}, r"model\.local_rope_theta = 100\.0: .*global_every is 0"),
        ({"model.local_rope_theta": 0.0}, r"model\.local_rope_theta = 0\.0: must be above 0"),
        ({"model.query_scale_dim": 0}, r"model\.query_scale_dim = 0: must be at least 1"),
        ({"model.pre_norms": False}, r"pre_norms = False: must be True, or model\.post_norms too"),
        ({"parallel.layer_loop": "scan"}, r"layer_loop = 'scan': must be unroll"),
        (
            {"model.num_layers": 2, "parallel.pipeline": 2, "parallel.num_microbatches": 2},
            r"model\.num_layers = 2: must be at least 3: 2 layers .*--model\.num-layers 3",
        ),
        (
            {"parallel.pipeline": 2, "parallel.layers_per_stage": "1,3"},
            r"layers_per_stage = '1,3': must be multiples of .*--parallel\.layers-per-stage 2,2",
        ),
        ({"model.activation": "relu"}, r"model\.activation = 'relu': must be one of silu, gelu"),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **TWO_KINDS | values))
