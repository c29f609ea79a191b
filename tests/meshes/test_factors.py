"""Factors and caps of Granite, Gemma 2 and Ministral 3: the plain model's gradients on meshes."""

import dataclasses
import functools
import math

import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Config, ConfigError, Glu, Layer, Rope, RopeScaling, replace
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.slow import slow
from tests.tiny import ATTENTION, EXPERTS, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

GRANITE = {
    "model.embedding_multiplier": 3.0,
    "model.residual_multiplier": 0.4,
    "model.layers.mixer.scale": 0.7,
    "model.logits_scaling": 1.6,
}
#: Scores and logits reach the caps.
CAPPED = dataclasses.replace(ATTENTION, softcap=0.5, scale_dim=6)
WIDE = Layer("global_layers", CAPPED, Glu(24, "gelu"), norms="around")
LOCAL = dataclasses.replace(WIDE, name="layers", mixer=dataclasses.replace(CAPPED, window=5))
GEMMA2 = {
    "model.layers": [LOCAL, WIDE],
    "model.logits_softcap": 0.7,
    "model.norm.offset": True,
    "model.embed_scale": True,
    "model.tie_embeddings": True,
    "parallel.layer_loop": "unroll",
    "train.z_loss": 1e-2,
}
SCALING = RopeScaling(kind="yarn", original_max_position=4, query_beta=0.3)
MINISTRAL3 = {"model.layers.mixer.rope": Rope(scaling=SCALING)}
BOTH = GRANITE | MINISTRAL3 | {"model.layers.mixer.softcap": 0.5, "model.logits_softcap": 0.7}

CASES = [
    ("data=2,sequence=2,tensor=2,context=ring", BOTH | {"parallel.loss_chunks": 2}),
    slow("data=2,tensor=2", GEMMA2),
    slow("pipeline=2,num_microbatches=2,zero=1,tensor=2", GEMMA2 | {"model.num_layers": 4}),
    slow("sequence=2,tensor=2,context=ulysses", GEMMA2 | {"model.*.mixer.num_kv_heads": 4}),
    slow("data=2,tensor=2,row_groups=2,layer_loop=unroll", BOTH),
    slow("pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll", BOTH),
    slow("sequence=4", MINISTRAL3 | {"data.document_mask": False}),
    slow("data=2,expert=2", GRANITE | {"model.layers.feed_forward": EXPERTS}),
]


@functools.cache
def reference_of(cfg: Config) -> tuple:
    batch = traces.random_batch(cfg, 0)
    return batch, weights.plain_gradients(cfg, batch)


@pytest.mark.slow  # quicker: convert/test_goldens.py
@pytest.mark.parametrize(("mesh", "values"), CASES)
def test_gradients(mesh, values, devices):
    cfg = replace(TINY, **values)
    parallel = parse_meshes([mesh], cfg.parallel)[mesh]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batch, wanted = reference_of(replace(cfg, **{"parallel.row_groups": 1}))
    found = weights.first_gradients(on_mesh, make_mesh(parallel, devices[:n]), batch)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.residual_multiplier": 0.0}, r"residual_multiplier = 0\.0: must be above 0"),
        ({"model.logits_scaling": -1.0}, r"logits_scaling = -1\.0: must be above 0"),
        ({"model.layers.mixer.softcap": 0.0}, r"mixer\.softcap = 0\.0: must be above 0"),
        ({"model.logits_softcap": -30.0}, r"logits_softcap = -30\.0: must be above 0"),
        ({"model.layers.mixer.scale": 0.0}, r"mixer\.scale = 0\.0: must be above 0"),
        (
            {"model.layers.mixer.scale": 0.1, "model.layers.mixer.scale_dim": 8},
            r"mixer\.scale = 0\.1: replaces .*scale_dim = 8",
        ),
        (
            {
                "model.layers.mixer.softcap": 50.0,
                "compute.attention_backend": "cudnn",
                "compute.dtype": "bfloat16",
                "model.layers.mixer.head_dim": 64,
            },
            r"softcap = 50\.0: .*cannot cap scores.*--compute\.attention-backend auto",
        ),
        (
            MINISTRAL3 | {"model.layers.mixer.rope.scaling.query_beta": -0.1},
            r"query_beta = -0\.1: must not be negative",
        ),
        (
            MINISTRAL3 | {"model.layers.mixer.rope.scaling.kind": "linear"},
            r"query_beta = 0\.3: needs kind yarn, not linear",
        ),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(TINY, **values))
