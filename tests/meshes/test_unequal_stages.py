"""Stages with unequal numbers of layers: the plain model's gradients and steps, and empty slots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import num_devices, parse_meshes
from jaxpar.config import Config, Layer, QkNorm, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.layer_order import EMPTY, layer_order, num_slots
from jaxpar.step.state import abstract_state, init_state
from jaxpar.step.train_step import make_gradient_step, make_train_step
from tests import weights
from tests.parallel.test_pipeline_branches import chosen_by_stage, equations
from tests.slow import slow
from tests.tiny import EXPERTS, GLU, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

#: Seven layers: a prime. Norms over all heads, of tensor ranks that hold some of them, and fewer
#: of keys: what test_meshes.py has in slow tests.
BASE = replace(
    TINY,
    **{
        "model.num_layers": 7,
        "model.layers.mixer.qk_norm": QkNorm(over="all"),
        "optimizer.clip_norm": 0.5,
    },
)

#: With branches, with masks, in a loop; one chunk or several; each schedule.
MESHES = """
pipeline=2,num_microbatches=2
pipeline=4,num_microbatches=4,zero=1,tensor=2,layer_loop=unroll
pipeline=2,num_microbatches=2,data=2,virtual_stages=3,layer_loop=unroll
""".split()

SLOW_MESHES = """
pipeline=2,num_microbatches=2,layer_loop=unroll
pipeline=4,num_microbatches=4,data=2,zero=1,layer_loop=unroll
pipeline=4,num_microbatches=2,data=2,zero=2,layer_loop=unroll
pipeline=3,num_microbatches=2,sequence=2,layer_loop=unroll
pipeline=3,num_microbatches=4,sequence=2,context=ring
pipeline=3,num_microbatches=2,tensor=2,zero=1,layer_loop=unroll,row_groups=2
pipeline=2,num_microbatches=2,data=2,tensor=2,virtual_stages=2,zero=1,layer_loop=unroll
pipeline=4,num_microbatches=4,virtual_stages=1,pipeline_save=inputs,zero=1,layer_loop=unroll
pipeline=2,num_microbatches=2,virtual_stages=2,pipeline_save=inputs,remat=full
pipeline=4,num_microbatches=4,schedule=gpipe,zero=1,layer_loop=unroll
pipeline=4,num_microbatches=2,schedule=gpipe,data=2
pipeline=4,num_microbatches=8,schedule=zero_bubble,zero=1,layer_loop=unroll,tensor=2
pipeline=2,num_microbatches=2,layers_per_stage=6,1,layer_loop=unroll,zero=1
pipeline=2,num_microbatches=2,layers_per_stage=2,5,layer_loop=unroll,data=2
pipeline=2,num_microbatches=2,virtual_stages=2,layers_per_stage=1,3,2,1,layer_loop=unroll
pipeline=2,num_microbatches=2,virtual_stages=2,layers_per_stage=1,3,1,2,sequence=2
pipeline=4,num_microbatches=2,remat_group=2
pipeline=2,num_microbatches=2,remat=offload,layer_loop=unroll
""".split()

WIDE, *_ = BASE.model.layers
LOCAL = Layer("local_layers", dataclasses.replace(WIDE.mixer, window=5), GLU)

VARIANTS = {
    "adapters": {"lora.rank": 2},
    "experts": {"model.layers.feed_forward": EXPERTS},
    "two kinds of layers": {"model.layers": [LOCAL, *[WIDE, LOCAL] * 3]},
    "tied": {
        "model.tie_embeddings": True,
        "model.layers.mixer.bias": True,
        "model.layers.mixer.qk_norm": QkNorm(),
    },
}


def on_mesh(cfg: Config, item: str, devices):
    """The resolved config of a mesh, and the mesh."""
    parallel = parse_meshes([item], cfg.parallel)[item]
    n = num_devices(parallel)
    return resolve(replace(cfg, parallel=parallel), n), make_mesh(parallel, devices[:n])


@functools.cache
def reference_of(cfg: Config, steps: int) -> tuple[list, traces.TrainingTrace]:
    batches = [traces.random_batch(cfg, i) for i in range(max(steps, 1))]
    if not steps:
        return batches, weights.plain_gradients(cfg, batches[0])
    return batches, traces.reference_trace(cfg, batches, steps)


def compare(item: str, cfg: Config, devices, steps: int = 0) -> distances.Comparison:
    batches, wanted = reference_of(cfg, steps)
    cfg, mesh = on_mesh(cfg, item, devices)
    if steps:
        found = traces.mesh_trace(cfg, mesh, batches, steps)
    else:
        found = weights.first_gradients(cfg, mesh, batches[0])
    return distances.compare(found, wanted, TOLERANCE)


@pytest.mark.parametrize("mesh", [MESHES[0], *map(slow, [*MESHES[1:], *SLOW_MESHES])])
def test_gradients(mesh, devices):
    assert not compare(mesh, BASE, devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["zero=1,tensor=2", "data=2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_model_variants(variant, mesh, devices):
    mesh = f"pipeline=3,num_microbatches=2,layer_loop=unroll,{mesh}"
    assert not compare(mesh, replace(BASE, **VARIANTS[variant]), devices).mismatches()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "pipeline=3,num_microbatches=4,data=2",
        "pipeline=4,num_microbatches=2,zero=1,layer_loop=unroll",
        "pipeline=2,num_microbatches=2,virtual_stages=2,tensor=2,zero=1,layer_loop=unroll",
    ],
)
def test_five_steps(mesh, devices):
    found = compare(mesh, BASE, devices, 5)
    assert found.update is not None and not found.mismatches()


# --------------------------------------------------------------------------- empty slots


def empty_rows(tree, cfg: Config) -> dict[str, np.ndarray]:
    """The rows of empty slots in the arrays of layers."""
    empty = layer_order(cfg) == EMPTY
    assert empty.any()
    return {name: np.asarray(a)[empty] for name, a in flat(tree).items() if "layers/" in name}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[:3])
def test_empty_slots_stay_zero(mesh, devices):
    cfg, mesh = on_mesh(replace(BASE, **{"optimizer.weight_decay": 0.1}), mesh, devices)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    state = init_state(cfg, mesh)
    state, _ = make_train_step(cfg, mesh)(state, batch)
    # After the first step, the first moment is a part of the gradient.
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        assert all(not rows.any() for rows in empty_rows(tree, cfg).values())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1:3])
def test_what_lies_in_an_empty_slot_has_no_effect(mesh, devices):
    """Not even if its layer computes NaN."""
    cfg, mesh = on_mesh(BASE, mesh, devices)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    params = init_state(cfg, mesh).params
    empty = jnp.asarray(layer_order(cfg) == EMPTY)

    def filled(x):
        of_rows = empty.reshape(-1, *[1] * (x.ndim - 1))
        return jax.device_put(jnp.where(of_rows, jnp.nan, x), x.sharding)

    other = dict(params, layers=jax.tree.map(filled, params["layers"]))
    step = make_gradient_step(cfg, mesh)
    (a, wanted), (b, found) = step(params, batch), step(other, batch)
    assert float(a["loss"]) == float(b["loss"]) and np.isfinite(b["grad_norm"])
    assert not distances.differing_arrays(traces.to_host(found), traces.to_host(wanted))


def test_a_branch_skips_an_empty_slot(devices):
    """Within the branch of the chunk: one of no matmul in the forward, and one in the backward,
    which also traces a forward for its structure alone (XLA removes it)."""
    cfg, mesh = on_mesh(BASE, "pipeline=2,num_microbatches=2,zero=1,layer_loop=unroll", devices)
    batch = jax.eval_shape(lambda: traces.random_batch(cfg))
    step = jax.make_jaxpr(make_gradient_step(cfg, mesh))(abstract_state(cfg).params, batch)

    def products(jaxpr) -> int:
        return sum(e.primitive.name == "dot_general" for e in equations(jaxpr))

    of_chunks = [max(pair, key=products) for pair in chosen_by_stage(step.jaxpr, 2)]
    found = [pair for work in of_chunks for pair in chosen_by_stage(work, 2)]
    assert len(found) == 3
    assert all(min(map(products, pair)) == 0 < max(map(products, pair)) for pair in found)


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({"pipeline": 2, "num_layers": 4}, None),
        ({"pipeline": 4}, [0, 1, 2, 3, 4, 5, 6, EMPTY]),
        ({"pipeline": 3}, [0, 1, 2, 3, 4, EMPTY, 5, 6, EMPTY]),
        ({"pipeline": 2, "layers_per_stage": (2, 5)}, [0, 1, *[EMPTY] * 3, 2, 3, 4, 5, 6]),
        ({"pipeline": 2, "virtual_stages": 2}, [0, 1, 4, 5, 2, 3, 6, EMPTY]),
        (
            {"pipeline": 2, "virtual_stages": 2, "layers_per_stage": (1, 3, 2, 1)},
            [0, EMPTY, EMPTY, 4, 5, EMPTY, 1, 2, 3, 6, EMPTY, EMPTY],
        ),
    ],
)
def test_the_slots_of_layers(fields, order):
    layers = fields.pop("num_layers", 7)
    parallel = dataclasses.replace(BASE.parallel, num_microbatches=4, data=1, **fields)
    cfg = replace(BASE, parallel=parallel, **{"model.num_layers": layers})
    found = layer_order(resolve(cfg, parallel.pipeline))
    assert (found is None) if order is None else found.tolist() == order
    assert num_slots(cfg) == (layers if order is None else len(order))
