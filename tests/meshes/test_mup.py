"""µP on meshes: training is that of the plain model on one device, with its own optimizer.

The factors of logits, scores and branches are also those of test_factors.py, and the updates those
of tests/optimizer/test_widths.py, on one device.
"""

import math

import pytest

from jaxpar.certification import distances, small_config, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import LatentAttention, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests.model.test_mup import WIDE
from tests.slow import slow
from tests.tiny import EXPERTS, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5
STEPS = 2

LATENT = {
    "model.layers.mixer": LatentAttention(
        num_heads=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, kv_lora_rank=8
    ),
    "model.mup.base_head_dim": None,
}
FOUR = {"model.num_layers": 4}
FEED_FORWARD = "model.layers.feed_forward"
SHARED = {FEED_FORWARD: EXPERTS, f"{FEED_FORWARD}.num_shared_experts": 1}

CASES = [
    slow("data=2,tensor=2", {}),
    slow("pipeline=2,num_microbatches=2,zero=1,tensor=2", FOUR | {"optimizer.name": "muon"}),
    slow("pipeline=2,num_microbatches=2,layers_per_stage=3,1", FOUR),
    slow("data=2,sequence=2,zero=2,layer_loop=unroll", {"model.tie_embeddings": True}),
    slow("data=2,expert=2,tensor=2", SHARED | {"optimizer.name": "lion"}),
    slow("data=2,tensor=2", {"optimizer.name": "adafactor"}),
    slow("data=2,tensor=2", {"lora.rank": 3}),
    slow("data=2,tensor=2", LATENT),
    slow("data=2", {"optimizer.offload": True}),
]


@pytest.mark.parametrize(("mesh", "fields"), CASES)
def test_training(mesh, fields, devices):
    rate = {"optimizer.learning_rate": 1e-3} if "lion" in fields.values() else {}
    cfg = small_config.steady(small_config.float32(replace(TINY, **(WIDE | rate | fields))))
    (parallel,) = parse_meshes([mesh], cfg.parallel).values()
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batches = [traces.random_batch(cfg, i) for i in range(STEPS)]
    found = traces.mesh_trace(on_mesh, make_mesh(parallel, devices[:n]), batches, STEPS)
    wanted = traces.reference_trace(cfg, batches, STEPS)
    assert not distances.compare(found, wanted, TOLERANCE).mismatches()
