"""Chunks of a pipeline that send nothing: each stage takes the branch of its own, or rests.

That the gradients are those of the plain model, tests/parity/test_meshes.py sees.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar import parity, step
from jaxpar.batch import Batch
from jaxpar.config import Config, replace
from jaxpar.parallel import pipeline
from jaxpar.parallel.float32_gradients import (
    Weight,
    added,
    closed,
    for_use,
    of_gradients,
    opened,
    opened_again,
)
from jaxpar.parallel.mesh import make_mesh
from jaxpar.state import abstract_state, init_state
from jaxpar.validation import resolve

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

BASE = replace(
    parity.float32(Config()),
    **{
        "model.num_layers": 4,
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_dim": 8,
        "model.d_ff": 80,
        "model.vocab_size": 64,
        "model.init_std": 0.2,
        "data.seq_len": 16,
        "train.global_batch_size": 8,
        "parallel.pipeline": 2,
        "parallel.virtual_stages": 2,
        "parallel.num_microbatches": 4,
        "parallel.layer_loop": "unroll",
        "parallel.zero": 1,
    },
)

COLLECTIVES = {"ppermute", "psum_invariant", "all_gather", "all_to_all", "reduce_scatter", "psum"}


def config(devices: int, **fields) -> Config:
    return resolve(replace(BASE, **fields), devices)


def inner(eqn):
    """The jaxprs that an equation runs."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield getattr(item, "jaxpr", item)


def equations(jaxpr):
    """All equations of a jaxpr, those of its inner ones among them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for within in inner(eqn):
            yield from equations(within)


def traced(cfg: Config, devices):
    """The gradient step's jaxpr."""
    mesh = make_mesh(cfg.parallel, devices)
    shape = (cfg.train.global_batch_size, cfg.data.seq_len)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = Batch(ints, ints, ints, ints)
    params = abstract_state(cfg).params
    return jax.make_jaxpr(step.make_gradient_step(cfg, mesh))(params, batch).jaxpr


def chosen_by_stage(jaxpr, count: int):
    """Branches of the conditionals that have `count` of them."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "cond" and len(eqn.params["branches"]) == count:
            yield [branch.jaxpr for branch in eqn.params["branches"]]


def collectives(jaxpr) -> list[str]:
    return [e.primitive.name for e in equations(jaxpr) if e.primitive.name in COLLECTIVES]


@pytest.mark.parametrize("fields", [{}, {"parallel.data": 2}, {"parallel.pipeline_save": "inputs"}])
def test_no_collective_is_in_a_branch_that_stages_choose(fields, devices):
    """It would wait for stages that took another one."""
    n = 2 * fields.get("parallel.data", 1)
    jaxpr = traced(config(n, **fields), devices[:n])
    found = list(chosen_by_stage(jaxpr, BASE.parallel.virtual_stages + 1))
    assert len(found) == 2, "one for the forward and one for the backward"
    for branches in found:
        work, idle = branches[:-1], branches[-1]
        assert all(sum(e.primitive.name == "dot_general" for e in equations(b)) for b in work)
        assert not any(map(collectives, branches)) and not idle.eqns
    assert "ppermute" in collectives(jaxpr), "this test would see one"


@pytest.mark.parametrize(
    "fields", [{"parallel.tensor": 2}, {"parallel.sequence": 2}, {"parallel.zero": 3}]
)
def test_chunks_that_send_are_not_run_in_a_branch(fields, devices):
    fields = fields | ({"parallel.data": 2} if "parallel.zero" in fields else {})
    jaxpr = traced(config(4, **fields), devices[:4])
    assert not list(chosen_by_stage(jaxpr, BASE.parallel.virtual_stages + 1))


@pytest.mark.parametrize("save", ["residuals", "inputs"])
@pytest.mark.parametrize("virtual", [1, 2])
def test_what_the_ring_begins_with_is_never_read(virtual, save, devices, monkeypatch):
    """On a GPU it is whatever lies there; here it is NaN."""
    cfg = config(2, **{"parallel.virtual_stages": virtual, "parallel.pipeline_save": save})
    mesh = make_mesh(cfg.parallel, devices[:2])
    params = init_state(cfg, mesh).params
    batch = parity.place_batch(parity.random_batch(cfg), cfg, mesh)
    _, wanted = step.make_gradient_step(cfg, mesh)(params, batch)

    filled = []

    def full_of_nan(shape, dtype):
        filled.append(shape)
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 7, dtype)

    monkeypatch.setattr(pipeline.lax, "empty", full_of_nan)
    measured, found = step.make_gradient_step(cfg, mesh)(params, batch)
    assert filled and {shape[0] for shape in filled} == {4 * virtual - 1}
    assert np.isfinite(measured.loss)
    assert not parity.differing(parity.to_host(found), parity.to_host(wanted))


@pytest.mark.parametrize(
    ("fields", "devices_used", "loops"),
    [
        ({}, 2, 1),
        ({"parallel.virtual_stages": 1, "parallel.tensor": 2, "parallel.row_groups": 2}, 4, 2),
        ({"parallel.pipeline": 1, "parallel.virtual_stages": 1, "parallel.data": 2}, 2, 1),
    ],
    ids=["interleaved", "tensor, rows in turns", "accumulation"],
)
def test_gradients_that_are_added_up_leave_the_matmul_in_float32(
    fields, devices_used, loops, devices
):
    """loops: those with a backward in them."""
    cfg = config(devices_used, **fields, **{"model.dtype": "bfloat16"})
    jaxpr = traced(cfg, devices[:devices_used])
    D, F = cfg.model.d_model, cfg.model.d_ff // cfg.parallel.tensor
    made = [e.outvars[0].aval for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    of_weights = [out for out in made if out.shape in {(D, F), (F, D)}]
    layers = cfg.model.num_layers // cfg.parallel.pipeline
    assert len(of_weights) == 3 * layers * cfg.parallel.row_groups * loops
    assert {out.dtype for out in of_weights} == {jnp.dtype(jnp.float32)}


def test_each_gradient_of_a_weight_is_added_to_the_sum_by_itself():
    """Not first to those of other rows: a matmul adds what it makes to one array."""
    total, parts = jnp.float32(1), (jnp.float32(2.0**-24), jnp.float32(2.0**-24))
    assert added(total, Weight(None, parts)) == 1  # their sum, 2**-23, would have changed it
    assert added(total, parts[0] + parts[1]) > 1


def test_opened_weights():
    """Closed, they hold no zeros, and opened again they are what they were."""
    w = {"wo": jnp.ones((2, 3), jnp.bfloat16), "attn_norm": jnp.ones(2)}
    cfg = config(1, **{"parallel.pipeline": 1, "parallel.virtual_stages": 1})
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])

    def shapes(w):
        open_ = opened(w, ("wo", "w_up"), uses=2)
        again = opened_again(closed(open_))
        assert jax.tree.map(jnp.shape, again) == jax.tree.map(jnp.shape, open_)
        assert [a.dtype for a in open_["wo"].gradients] == [jnp.float32] * 2
        assert len(jax.tree.leaves(closed(open_))) == len(jax.tree.leaves(w)) == 2
        assert len(for_use(open_, 1)["wo"].gradients) == 1
        assert of_gradients(open_)["wo"].values is None
        return w

    one = PartitionSpec()
    jax.eval_shape(jax.shard_map(shapes, mesh=mesh, in_specs=one, out_specs=one), w)
