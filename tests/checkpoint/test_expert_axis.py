"""Checkpoints of an expert axis: the logical arrays of every other mesh."""

import pytest

from jaxpar import config
from jaxpar.checkpoint.loading import restore
from jaxpar.config import Config, Experts, Glu, Layer, Router
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from tests.checkpoint.test_checkpoint import assert_same_bits, logical, save, write_dataset
from tests.slow import slow
from tests.tiny import ATTENTION, GLU, STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

EXPERTS = {
    "model.layers.feed_forward": Experts(
        expert=Glu(24, bias=True),
        num_experts=8,
        experts_per_token=2,
        router=Router(balancing_bias=True),
    ),
    "parallel.data": 1,
}
EXPERT_4 = {"parallel.expert": 4}
OTHERS = [
    {"parallel.expert": 2, "parallel.tensor": 2},
    slow({"parallel.expert": 1}),
    slow({"parallel.expert": 2, "parallel.data": 2}),
    slow({"parallel.expert": 2, "parallel.pipeline": 2, "parallel.num_microbatches": 2}),
]
#: A dense layer before unequal stages.
DENSE = {
    "model.layers": [Layer("dense_layers", ATTENTION, GLU), *STATE["model"].layers[1:]],
    "parallel.layer_loop": "unroll",
}
STAGES = {"parallel.pipeline": 2, "parallel.num_microbatches": 2}


@pytest.mark.parametrize("other", OTHERS)
def test_another_expert_degree_reads_the_same_arrays(tmp_path, devices, other):
    _move(tmp_path, devices, EXPERT_4, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [slow(STAGES | DENSE, EXPERT_4 | DENSE), (EXPERT_4 | DENSE, STAGES | DENSE)],
)
def test_dense_layers_move_between_meshes_with_and_without_stages(tmp_path, devices, one, other):
    _move(tmp_path, devices, one, other)


def _move(tmp_path, devices, one, other):
    data = write_dataset(tmp_path / "data")
    fields = STATE | EXPERTS | {"data.path": data, "run.dir": str(tmp_path / "run")}

    def make(values):
        cfg = config.replace(Config(), **fields | values)
        p = cfg.parallel
        n = p.pipeline * p.data * p.expert * p.tensor
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    cfg, mesh = make(one)
    expected = logical(save(cfg, mesh, 5), cfg)
    cfg, mesh = make(other)
    assert_same_bits(logical(restore(cfg, mesh), cfg), expected)
