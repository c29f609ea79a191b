"""Dispatch by rows: the same loss, gradients and steps as the plain model's, in any rounds."""

import pytest

from jaxpar.config import replace
from tests.meshes.test_experts import BASE, DEEPSEEK, THREE_EACH, compare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile")]

BY_ROWS = replace(DEEPSEEK, **{"parallel.expert_dispatch": "rows"})

#: Fewer rows than equal shares.
IN_ROUNDS = replace(BY_ROWS, **{"parallel.expert_slack": 0.3})

MESHES = """
expert=2,sequence=2
expert=2,sequence=2,layer_loop=unroll
expert=2,pipeline=2,num_microbatches=2,zero=1
expert=2
expert=4
expert=8
expert=2,data=2
expert=4,data=2,zero=1,num_microbatches=1
expert=2,data=2,zero=2
expert=2,tensor=2,layer_loop=unroll
expert=4,tensor=2,zero=1
expert=4,sequence=2
expert=2,layer_loop=unroll,row_groups=2
expert=4,replica=2
expert=4,pipeline=2,num_microbatches=2
expert=2,replica=2,num_microbatches=2
expert=2,data=2,tensor=2,layer_loop=unroll,row_groups=2
expert=2,pipeline=2,num_microbatches=2
expert=2,pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
expert=2,pipeline=2,sequence=2,num_microbatches=2,pipeline_save=inputs
expert=4,pipeline=2,tensor=2,num_microbatches=2
expert=2,remat=full
expert=4,remat=none,layer_loop=unroll
""".split()


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_with_rows_in_further_rounds(mesh, devices):
    """A row that is dropped changes the loss and every gradient."""
    assert not compare(mesh, IN_ROUNDS, devices).mismatches()


OF_EIGHT = """
expert=8,data=2
expert=8,replica=2,zero=1
expert=8,sequence=2,layer_loop=unroll
expert=8,tensor=2
expert=8,pipeline=2,num_microbatches=2
""".split()


@pytest.mark.parametrize("mesh", OF_EIGHT)
def test_gradients_on_sixteen_devices(mesh, devices):
    cfg = replace(IN_ROUNDS, **{"train.global_batch_size": 16})
    assert not compare(mesh, cfg, devices).mismatches()


@pytest.mark.parametrize("mesh", ["expert=2", "expert=4,data=2", "expert=2,tensor=2"])
def test_gradients_with_the_default_buffer(mesh, devices):
    assert not compare(mesh, BY_ROWS, devices).mismatches()


@pytest.mark.parametrize("mesh", ["expert=4,data=2", "expert=2,pipeline=2,num_microbatches=2"])
def test_steps(mesh, devices):
    found = compare(mesh, IN_ROUNDS, devices, 5)
    assert found.update is not None and not found.mismatches()


def test_gradients_of_three_experts_each_without_normalization(devices):
    ours = {"parallel.expert_dispatch": "rows", "parallel.expert_slack": 0.5}
    assert not compare("expert=4", replace(BASE, **THREE_EACH | ours), devices).mismatches()
