"""Dispatch by rows: the same loss, gradients and steps as the plain model's, in any rounds."""

import pytest

from jaxpar.config import replace
from tests.meshes.test_experts import DEEPSEEK, compare
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile")

BY_ROWS = replace(DEEPSEEK, **{"parallel.expert_dispatch": "rows"})

#: Fewer rows than equal shares.
IN_ROUNDS = replace(BY_ROWS, **{"parallel.expert_slack": 0.3})

QUICK_MESHES = """
expert=2,sequence=2,layer_loop=unroll
expert=2,pipeline=2,num_microbatches=2,zero=1
""".split()

MORE_MESHES = """
expert=2
expert=4
expert=8
expert=2,data=2
expert=4,data=2,zero=1,num_microbatches=1
expert=2,data=2,zero=2
expert=2,tensor=2,layer_loop=unroll
expert=4,tensor=2,zero=1
expert=2,replica=2,num_microbatches=2
expert=2,data=2,tensor=2,layer_loop=unroll,row_groups=2
expert=2,pipeline=2,num_microbatches=2
expert=2,pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
expert=2,pipeline=2,sequence=2,num_microbatches=2,pipeline_save=inputs
expert=4,pipeline=2,tensor=2,num_microbatches=2
expert=2,remat=full
expert=4,remat=none,layer_loop=unroll
""".split()


@pytest.mark.parametrize("mesh", [*QUICK_MESHES, *map(slow, MORE_MESHES)])
def test_gradients_with_rows_in_further_rounds(mesh, devices):
    """A row that is dropped changes the loss and every gradient."""
    assert not compare(mesh, IN_ROUNDS, devices).mismatches()
