"""Mixtures of experts: the same loss, gradients and steps on every mesh as the plain model's."""

import dataclasses
import functools
import math

import numpy as np
import pytest

from jaxpar.certification import distances, small_config, traces
from jaxpar.certification.meshes import parse_meshes, resolve_meshes
from jaxpar.config import (
    ClampedSwiglu,
    Config,
    ConfigError,
    Experts,
    Glu,
    Layer,
    Mlp,
    Router,
    replace,
)
from jaxpar.config.validate import check, resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from tests import weights
from tests.slow import slow_but
from tests.tiny import ATTENTION, EXPERTS, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

FEED_FORWARD = "model.layers.feed_forward"

BASE = replace(TINY, **{FEED_FORWARD: EXPERTS, f"{FEED_FORWARD}.expert.d_ff": 12})

#: Every option of a router, as DeepSeek-V3 has them, with losses that count.
OF_DEEPSEEK = Experts(
    expert=Glu(12),
    num_experts=8,
    experts_per_token=2,
    router=Router(score="sigmoid", balancing_bias=True, groups=4, groups_per_token=2, scale=2.5),
    num_shared_experts=2,
)
DEEPSEEK = replace(
    TINY,
    **{
        FEED_FORWARD: OF_DEEPSEEK,
        "train.balance_loss": 0.3,
        "train.router_z_loss": 0.1,
        "train.router_bias_rate": 0.01,
    },
)

CLAMPED = ClampedSwiglu(limit=0.5)

#: gpt-oss's experts. Many values of this small model are beyond the limit.
GPT_OSS = replace(
    BASE,
    **{
        f"{FEED_FORWARD}.expert": Glu(12, CLAMPED, bias=True),
        f"{FEED_FORWARD}.router.linear_bias": True,
        "model.init_std": 0.3,
        "train.balance_loss": 0.3,
        "parallel.expert_slack": 0.5,
    },
)

THREE_EACH = {f"{FEED_FORWARD}.router.normalize": False, f"{FEED_FORWARD}.experts_per_token": 3}

OVER_BATCH = replace(BASE, **{"train.balance_loss": 0.3, "train.balance_over": "batch"})

#: With every option and with a loss over the batch, quicker tests below have these meshes' parts.
SLOW_MESHES = """
expert=2,sequence=2,layer_loop=unroll
data=2
tensor=2
pipeline=2,num_microbatches=2,zero=1
data=2,num_microbatches=2,zero=2
data=2,tensor=2,layer_loop=unroll,row_groups=2
pipeline=2,sequence=2,tensor=2,num_microbatches=2
pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
""".split()


GPT_OSS_MESHES = """
expert=2,tensor=2
expert=2,tensor=2,layer_loop=unroll
data=1
data=2,sequence=2
expert=2,tensor=2,expert_dispatch=rows
expert=4,data=2,zero=1,expert_dispatch=rows,layer_loop=unroll
expert=2,replica=2,zero=2,num_microbatches=2
tensor=2,sequence=2,remat=none
data=2,tensor=2,layer_loop=unroll,row_groups=2
expert=2,pipeline=2,num_microbatches=2,zero=1
pipeline=2,tensor=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
data=2,remat=full
""".split()


@functools.cache
def reference_of(cfg: Config, steps: int):
    batches = [traces.random_batch(cfg, i) for i in range(max(steps, 1))]
    if not steps:
        return batches, weights.plain_gradients(cfg, batches[0])
    return batches, traces.reference_trace(cfg, batches, steps)


def compare(mesh_item: str, cfg: Config, devices, steps: int = 0) -> distances.Comparison:
    parallel = parse_meshes([mesh_item], cfg.parallel)[mesh_item]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batches, wanted = reference_of(cfg, steps)
    mesh = make_mesh(parallel, devices[:n])
    if steps:
        found = traces.mesh_trace(on_mesh, mesh, batches, steps)
    else:
        found = weights.first_gradients(on_mesh, mesh, batches[0])
    return distances.compare(found, wanted, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SLOW_MESHES)
def test_gradients(mesh, devices):
    found = compare(mesh, BASE, devices)
    assert not found.mismatches()


DEEPSEEK_MESHES = """
data=2,sequence=2,tensor=2,layer_loop=unroll
pipeline=2,data=2,sequence=2,tensor=2,num_microbatches=2
pipeline=2,data=2,num_microbatches=2
data=1
expert=2,num_microbatches=2
data=2,zero=1
data=2,zero=2,num_microbatches=2
replica=2,tensor=2
data=4,layer_loop=unroll
data=2,tensor=2,layer_loop=unroll,row_groups=2
tensor=2,num_microbatches=4,zero=1,layer_loop=unroll
pipeline=2,data=2,num_microbatches=2,layer_loop=unroll
pipeline=2,replica=2,num_microbatches=4,zero=1,layer_loop=unroll
pipeline=2,tensor=2,num_microbatches=2,schedule=gpipe,layer_loop=unroll
pipeline=2,sequence=2,tensor=2,num_microbatches=2,pipeline_save=inputs
data=2,remat=full
data=2,remat=none,layer_loop=unroll
""".split()


@pytest.mark.parametrize("mesh", slow_but(DEEPSEEK_MESHES[:1], DEEPSEEK_MESHES))
def test_gradients_with_every_router_option(mesh, devices):
    assert not compare(mesh, DEEPSEEK, devices).mismatches()


@pytest.fixture
def drawn_biases(monkeypatch):
    """Biases begin as zeros, with which many a mistake has no effect."""
    of_specs = weights.values_of

    @functools.cache
    def values_of(specs, seed):
        values, rng = of_specs(specs, seed), np.random.default_rng(seed)
        layers = values["layers"]
        drawn = {
            name: rng.normal(size=a.shape).astype(a.dtype) * 0.3
            for name, a in layers.items()
            if name.startswith("b_")
        }
        assert list(drawn) == ["b_down", "b_gate", "b_router", "b_up"]
        return values | {"layers": layers | drawn}

    monkeypatch.setattr(weights, "values_of", values_of)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", GPT_OSS_MESHES)
@pytest.mark.usefixtures("drawn_biases")
def test_gradients_with_biases_and_clamps(mesh, devices):
    found = compare(mesh, GPT_OSS, devices)
    assert not found.mismatches()


#: Experts of two matrices, a shared one among them.
WITHOUT_GATE = {f"{FEED_FORWARD}.expert": Mlp(12, "gelu")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "expert=2,tensor=2,layer_loop=unroll",
        "expert=2,tensor=2,expert_tensor=1",
        "pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll",
    ],
)
def test_gradients_without_a_gate(mesh, devices):
    assert not compare(mesh, replace(DEEPSEEK, **WITHOUT_GATE), devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["expert=2,tensor=2,layer_loop=unroll", "data=2,layer_loop=unroll"]
)
@pytest.mark.usefixtures("drawn_biases")
def test_gradients_with_clamps_in_dense_layers_and_shared_experts(mesh, devices):
    (layer, _), dense = GPT_OSS.model.layers, Layer("dense_layers", ATTENTION, Glu(16, CLAMPED))
    shared = dataclasses.replace(layer.feed_forward, num_shared_experts=1)
    layers = [dense, dataclasses.replace(layer, feed_forward=shared)]
    assert not compare(mesh, replace(GPT_OSS, **{"model.layers": layers}), devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["expert=2,tensor=2,expert_dispatch=rows", "pipeline=2,data=2,num_microbatches=2"]
)
def test_steps_with_biases_and_clamps(mesh, devices):
    found = compare(mesh, GPT_OSS, devices, 5)
    assert found.update is not None and not found.mismatches()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "data=2,expert=2,sequence=2",
        "data=2,expert=2,sequence=2,layer_loop=unroll",
        "data=2,sequence=2",
        "pipeline=2,replica=2,tensor=2",
        "data=4,tensor=2",
    ],
)
def test_gradients_of_balance_over_the_batch(mesh, devices):
    assert not compare(mesh, OVER_BATCH, devices).mismatches()


@pytest.mark.slow
def test_losses_reach_the_router():
    """The same tests with another weight of a loss would fail."""
    base = replace(DEEPSEEK, **{"model.num_layers": 1})
    batch = traces.random_batch(base)
    found = weights.plain_gradients(base, batch).gradients["layers/router"]
    for path in ("train.balance_loss", "train.router_z_loss"):
        without = replace(base, **{path: 0.0})
        other = weights.plain_gradients(without, batch).gradients["layers/router"]
        assert np.abs(found - other).max() > 1e-2 * np.abs(found).max()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "pipeline=2,data=2,num_microbatches=2"])
def test_steps_with_every_router_option(mesh, devices):
    found = compare(mesh, DEEPSEEK, devices, 5)
    assert found.update is not None and not found.mismatches()


@pytest.mark.slow
def test_gradients_without_normalization(devices):
    found = compare("tensor=2", replace(BASE, **THREE_EACH, **{"model.num_layers": 1}), devices)
    assert not found.mismatches()


@pytest.mark.slow
def test_three_steps(devices):
    found = compare("pipeline=2,tensor=2,num_microbatches=2,zero=1", BASE, devices, 3)
    assert found.update is not None and not found.mismatches()


def test_shrinking_keeps_the_experts():
    def shrunk(experts: Experts) -> tuple[int, int]:
        small = small_config.shrink(replace(BASE, **{FEED_FORWARD: experts}), [BASE.parallel])
        check(small)
        found = small.model.layers[0].feed_forward
        return found.num_experts, found.experts_per_token

    assert shrunk(dataclasses.replace(EXPERTS, num_experts=128)) == (8, 2)
    router = Router(groups=8, groups_per_token=4)
    of_256 = Experts(expert=Glu(12), num_experts=256, experts_per_token=8, router=router)
    assert shrunk(of_256) == (16, 4)


def test_verify_refuses_a_loss_that_depends_on_microbatches():
    name = "data=2,num_microbatches=2"
    meshes = parse_meshes([name], OVER_BATCH.parallel)
    with pytest.raises(ConfigError, match=r"has 2 microbatches.*--train.balance-over sequence"):
        resolve_meshes(OVER_BATCH, meshes, 8, given=True)
    assert resolve_meshes(DEEPSEEK, meshes, 8, given=True)[0]


#: On an expert axis, with every option, and a buffer too small for equal shares.
ON_EXPERT_AXIS = replace(
    DEEPSEEK, **{"parallel.expert_slack": 0.3, "parallel.expert_dispatch": "tokens"}
)

EXPERT_MESHES = """
expert=2,sequence=2,layer_loop=unroll,row_groups=2
expert=2
expert=2,sequence=2,layer_loop=unroll
expert=2,layer_loop=unroll,row_groups=2
expert=2,pipeline=2,num_microbatches=2,zero=1
expert=4
expert=8
expert=2,data=2
expert=4,data=2,zero=1,num_microbatches=1
expert=2,data=2,zero=2
expert=2,tensor=2,layer_loop=unroll
expert=4,tensor=2,zero=1
expert=2,replica=2,num_microbatches=2
expert=2,data=2,tensor=2,layer_loop=unroll,row_groups=2
expert=2,pipeline=2,num_microbatches=2,layer_loop=unroll,row_groups=2,zero=1
expert=2,pipeline=2,num_microbatches=2
expert=2,pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
expert=2,pipeline=2,sequence=2,num_microbatches=2,pipeline_save=inputs
expert=2,remat=full
expert=4,remat=none,layer_loop=unroll
""".split()


@pytest.mark.slow  # quicker: test_expert_metrics.py
@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_gradients_with_rows_in_further_rounds(mesh, devices):
    """A row that is dropped changes the loss and every gradient."""
    assert not compare(mesh, ON_EXPERT_AXIS, devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["expert=2", "expert=4,data=2", "expert=2,tensor=2"])
def test_gradients_with_the_default_buffer(mesh, devices):
    assert not compare(mesh, DEEPSEEK, devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["expert=4,data=2", "expert=2,pipeline=2,num_microbatches=2"])
def test_steps_on_an_expert_axis(mesh, devices):
    found = compare(mesh, ON_EXPERT_AXIS, devices, 5)
    assert found.update is not None and not found.mismatches()
