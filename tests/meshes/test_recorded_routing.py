"""Recorded routing: what is recorded is what was computed, and it can be repeated on every mesh."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.components.experts import experts_in
from jaxpar.config import Config, Experts, Glu, Layer, replace
from jaxpar.config.validate import resolve
from jaxpar.monitoring.routing import in_text_order
from jaxpar.parallel.context import token_order
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_train_step
from tests.meshes.test_experts import DEEPSEEK
from tests.slow import slow
from tests.tiny import ATTENTION

pytestmark = pytest.mark.usefixtures("quick_compile")

#: Three layers of which one is dense, so that indices of layers count.
WITH_DENSE = replace(
    DEEPSEEK,
    **{
        "model.layers": [Layer("dense_layers", ATTENTION, Glu(12)), *DEEPSEEK.model.layers],
        "parallel.layer_loop": "unroll",
    },
)

MORE_MESHES = """
expert=2,sequence=2,layer_loop=unroll
expert=4,replica=2,zero=2
data=2,tensor=2,layer_loop=unroll,row_groups=2
tensor=2,num_microbatches=4,zero=1,layer_loop=unroll
pipeline=2,data=2,num_microbatches=2
pipeline=2,num_microbatches=2,schedule=gpipe,layer_loop=unroll
pipeline=2,sequence=2,tensor=2,num_microbatches=2,pipeline_save=inputs
expert=2,pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
""".split()

STAGES = """
pipeline=2,virtual_stages=2,num_microbatches=2
pipeline=2,num_microbatches=2,layers_per_stage=3,1
""".split()


@dataclasses.dataclass(frozen=True)
class Step:
    """The first step on a mesh: its metrics, and its routing in the order of the text."""

    metrics: dict[str, np.ndarray]
    routing: np.ndarray | None


@functools.cache
def step_on(mesh_item: str, cfg: Config, record: bool) -> tuple[Config, jax.sharding.Mesh, Any]:
    """The resolved config, the mesh and the train step."""
    parallel = parse_meshes([mesh_item], cfg.parallel)[mesh_item]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    mesh = make_mesh(parallel, jax.devices()[:n])
    asked = ("expert_rows", "routing") if record else ("expert_rows",)
    return on_mesh, mesh, make_train_step(on_mesh, mesh, requested=asked)


def first_step(
    mesh_item: str, cfg: Config, experts: np.ndarray | None = None, *, record: bool = True
) -> Step:
    """Take a step on random weights and tokens.

    Args:     experts: the routing to repeat. None: routers choose.
    """
    on_mesh, mesh, step = step_on(mesh_item, cfg, record)
    batch = dataclasses.replace(traces.random_batch(cfg), experts=experts)
    _, measured = step(init_state(on_mesh, mesh), traces.shard_batch(batch, on_mesh, mesh))
    metrics = {k: np.asarray(v) for k, v in measured.items()}
    routing = metrics.pop("routing", None)
    if routing is not None:
        routing = in_text_order(routing, token_order(on_mesh.parallel, cfg.data.seq_len))
    return Step(metrics, routing)


@functools.cache
def alone(cfg: Config) -> Step:
    return first_step("data=1", cfg)


def routed_in(cfg: Config) -> tuple[Experts, ...]:
    return experts_in(cfg.model)


def other_routing(cfg: Config) -> np.ndarray:
    """Random experts, which no router would choose."""
    routed, rng = routed_in(cfg), np.random.default_rng(0)
    tokens = cfg.train.global_batch_size, cfg.data.seq_len, len(routed)
    drawn = rng.random((*tokens, routed[0].num_experts)).argsort(axis=-1)
    kind = np.uint8 if routed[0].num_experts <= 256 else np.uint16
    return drawn[..., : routed[0].experts_per_token].astype(kind)


@functools.cache
def other_alone(cfg: Config) -> Step:
    return first_step("data=1", cfg, other_routing(cfg), record=False)


def loads_of(routing: np.ndarray, cfg: Config) -> np.ndarray:
    count = functools.partial(np.bincount, minlength=routed_in(cfg)[0].num_experts)
    return np.stack([count(of_layer.ravel()) for of_layer in np.moveaxis(routing, 2, 0)])


@pytest.mark.slow  # quicker: on a mesh, below
def test_a_step_that_repeats_its_own_routing_is_the_same_bit_for_bit(devices):
    recorded = alone(DEEPSEEK)
    assert recorded.routing is not None and recorded.routing.dtype == np.uint8
    again = first_step("data=1", DEEPSEEK, recorded.routing, record=False)
    assert again.routing is None
    np.testing.assert_array_equal(
        recorded.metrics["expert_rows"], loads_of(recorded.routing, DEEPSEEK)
    )
    for name, value in recorded.metrics.items():
        np.testing.assert_array_equal(again.metrics[name], value, err_msg=name)


@pytest.mark.slow
def test_another_routing_gives_another_loss(devices):
    found, other = alone(DEEPSEEK).metrics, other_alone(DEEPSEEK).metrics
    assert abs(found["loss"] - other["loss"]) > 1e-3


@pytest.mark.parametrize("mesh", ["expert=2,sequence=2", *map(slow, MORE_MESHES)])
def test_a_routing_is_repeated_on_a_mesh(mesh, devices):
    check_repeated(mesh, DEEPSEEK)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MORE_MESHES)
def test_what_a_meshs_routers_choose_is_recorded(mesh, devices):
    own = first_step(mesh, DEEPSEEK)
    np.testing.assert_array_equal(own.routing, alone(DEEPSEEK).routing)
    np.testing.assert_array_equal(own.metrics["expert_rows"], loads_of(own.routing, DEEPSEEK))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", STAGES)
def test_stages_of_several_chunks_or_of_unequal_sizes(mesh, devices):
    check_repeated(mesh, replace(DEEPSEEK, **{"model.num_layers": 4}))


@pytest.mark.slow
def test_after_dense_layers(devices):
    check_repeated("expert=2,data=2,layer_loop=unroll", WITH_DENSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "expert=2,layer_loop=scan",
        "pipeline=2,num_microbatches=2,layer_loop=scan",
        "pipeline=2,virtual_stages=2,num_microbatches=2,layer_loop=unroll",
    ],
)
def test_layers_that_alternate(mesh, devices):
    """Dense ones with experts, and experts of two names: a scan has several layers in a step."""
    dense, moe = WITH_DENSE.model.layers[:2]
    period = dense, moe, dataclasses.replace(moe, name="other_layers"), dense
    model = WITH_DENSE.model.with_layers(period * (4 if "virtual" in mesh else 2))
    check_repeated(mesh, dataclasses.replace(WITH_DENSE, model=model))


@pytest.mark.slow
def test_more_experts_than_a_byte_counts(devices):
    many = {
        "model.layers.feed_forward.num_experts": 272,
        "model.layers.feed_forward.expert.d_ff": 4,
    }
    check_repeated("expert=2", replace(DEEPSEEK, **many))


def check_repeated(mesh: str, cfg: Config) -> None:
    """A routing gives the loss and the gradients here that it gives on one device, and is recorded
    as it was given, with the loads that are reported."""
    other, wanted = first_step(mesh, cfg, other_routing(cfg)), other_alone(cfg)
    np.testing.assert_array_equal(other.routing, other_routing(cfg))
    np.testing.assert_array_equal(other.metrics["expert_rows"], loads_of(other.routing, cfg))
    for name in ("loss", "grad_norm", "balance_loss", "router_z_loss"):
        np.testing.assert_allclose(other.metrics[name], wanted.metrics[name], rtol=2e-6)
