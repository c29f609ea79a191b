"""Experts spread over tensor ranks (`parallel.expert_tensor` 1): the plain model's numbers."""

import pytest

from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import specs_of
from jaxpar.sharding.params import partition_specs
from tests.meshes.test_experts import (
    BASE,
    DEEPSEEK,
    GPT_OSS,
    OVER_BATCH,
    compare,
    drawn_biases,  # noqa: F401
)
from tests.slow import slow
from tests.tiny import GLU

pytestmark = pytest.mark.usefixtures("quick_compile")

SPREAD = "tensor=2,expert_tensor=1"

HEADS = {"model.layers.mixer.num_kv_heads": 4}

MESHES = [
    slow(f"expert=2,{SPREAD}", DEEPSEEK),
    (SPREAD, BASE),
    slow(f"expert=2,{SPREAD},layer_loop=unroll,zero=1", OVER_BATCH),
    slow(f"data=2,{SPREAD},expert_dispatch=rows,layer_loop=unroll", DEEPSEEK),
    slow(f"sequence=2,{SPREAD},remat=none", DEEPSEEK),
    slow(f"replica=2,{SPREAD},expert_slack=0.3", OVER_BATCH),
    slow(f"{SPREAD},pipeline=2,num_microbatches=2,zero=1", DEEPSEEK),
    slow(f"{SPREAD},expert=2,row_groups=2,layer_loop=unroll", DEEPSEEK),
    slow("tensor=4,expert_tensor=1,data=2", replace(DEEPSEEK, **HEADS)),
]

BIASED = [
    f"expert=2,{SPREAD},expert_dispatch=rows",
    f"expert=2,{SPREAD},num_microbatches=2,zero=2,remat=full",
    f"{SPREAD},pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll",
]


@pytest.mark.parametrize(("mesh", "cfg"), MESHES)
def test_gradients(mesh, cfg, devices):
    assert not compare(mesh, cfg, devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", BIASED)
@pytest.mark.usefixtures("drawn_biases")
def test_gradients_with_biases(mesh, devices):
    assert not compare(mesh, GPT_OSS, devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [f"expert=2,{SPREAD}", f"data=2,{SPREAD},expert_dispatch=rows"])
def test_steps(mesh, devices):
    """Weights after some steps, and the biases that loads have moved."""
    found = compare(mesh, DEEPSEEK, devices, steps=3)
    assert found.update is not None and not found.mismatches()


def test_a_device_has_whole_experts():
    p = {"parallel.expert": 2, "parallel.tensor": 2, "parallel.expert_tensor": 1}
    cfg = resolve(replace(DEEPSEEK, **p), 4)
    specs = partition_specs(specs_of(cfg))["layers"]
    assert specs["w_gate"][1] == ("expert", "tensor") and specs["w_gate"][3] is None
    assert specs["w_shared_gate"][2] == "tensor"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"parallel.expert_tensor": 3}, "parallel.expert_tensor"),
        ({"parallel.expert_tensor": 2}, "parallel.expert_tensor"),
        ({"parallel.tensor": 4, "parallel.expert_tensor": 2}, "parallel.expert_tensor"),
        ({"parallel.tensor": 2, "parallel.expert_tensor": 1, "parallel.expert": 4}, "num_experts"),
        ({"model.layers.feed_forward": GLU, "parallel.expert_tensor": 1}, "needs experts"),
    ],
)
def test_bad_values_are_one_error(values, said):
    with pytest.raises(ConfigError, match=said):
        resolve(replace(BASE, **values), 8)
