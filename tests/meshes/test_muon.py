"""Muon in the train step: its updates on a mesh are those of the plain model on one device.

`tests/optimizer/test_muon.py` compares the updates alone, in less time.
"""

import functools
import math

import pytest

from jaxpar.certification import distances, small_config, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests.meshes.test_recurrent_layers import DELTA_NET, NEMOTRON_H
from tests.slow import slow
from tests.tiny import EXPERTS, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5
STEPS = 3

FEED_FORWARD = "model.layers.feed_forward"
OF_EXPERTS = {FEED_FORWARD: EXPERTS, f"{FEED_FORWARD}.router.balancing_bias": True}

CASES = [
    slow("data=2,tensor=2,num_microbatches=2,zero=2,layer_loop=unroll", TINY, {}),
    slow("pipeline=2,data=2,sequence=2,tensor=2", TINY, {"model.num_layers": 4}),
    slow("pipeline=2,num_microbatches=2,layers_per_stage=3,1", TINY, {"model.num_layers": 4}),
    slow("replica=2,data=2,expert=2", TINY, OF_EXPERTS),
    slow("data=2,tensor=2", TINY, {"model.mtp_depth": 1, "train.mtp_loss": 0.3}),
    slow("data=2,tensor=2", TINY, {"lora.rank": 3}),
    slow("data=2,tensor=2", DELTA_NET, {}),
    slow("data=2,tensor=2", NEMOTRON_H, {}),
]


@functools.cache
def reference_of(cfg: Config) -> traces.TrainingTrace:
    return traces.reference_trace(cfg, batches_of(cfg), STEPS)


def batches_of(cfg: Config) -> list:
    return [traces.random_batch(cfg, i) for i in range(STEPS)]


@pytest.mark.parametrize(("mesh", "base", "fields"), CASES)
def test_training(mesh, base, fields, devices):
    muon = {"optimizer.name": "muon", "optimizer.learning_rate": 1e-2}
    cfg = small_config.steady(small_config.float32(replace(base, **(muon | fields))))
    parallel = parse_meshes([mesh], cfg.parallel)
    (parallel,) = parallel.values()
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    here = make_mesh(parallel, devices[:n])
    found = traces.mesh_trace(on_mesh, here, batches_of(cfg), STEPS)
    assert not distances.compare(found, reference_of(cfg), TOLERANCE).mismatches()
