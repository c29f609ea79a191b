"""Chunks of a pipeline in branches: each stage takes the branch of its own, or rests.

That the gradients are those of the plain model, tests/meshes/test_meshes.py sees.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.certification import distances, small_config, traces
from jaxpar.config import Attention, Config, Experts, Glu, Layer, Model, QkNorm, replace
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.parallel.gradient_buffers import (
    Float32GradientWeight,
    add_gradient,
    attach_buffers,
    buffers_of_use,
    detach_buffers,
    only_gradients,
    reattach_buffers,
)
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import train_step
from jaxpar.step.state import abstract_state, init_state
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

_BLOCK = Layer("layers", Attention(num_heads=2, num_kv_heads=2, head_dim=8), Glu(80))
BASE = replace(
    small_config.float32(Config()),
    **{
        "model": Model(d_model=16, vocab_size=64, layers=[_BLOCK] * 4, init_std=0.2),
        "data.seq_len": 16,
        "train.global_batch_size": 8,
        "parallel.pipeline": 2,
        "parallel.virtual_stages": 2,
        "parallel.num_microbatches": 4,
        "parallel.layer_loop": "unroll",
        "parallel.zero": 1,
    },
)

#: Equations that name a mesh axis and send nothing.
SILENT = {"axis_index", "pcast", "pvary"}


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
    return jax.make_jaxpr(train_step.make_gradient_step(cfg, mesh))(params, batch).jaxpr


def chosen_by_stage(jaxpr, count: int):
    """Branches of the conditionals that have `count` of them."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "cond" and len(eqn.params["branches"]) == count:
            yield [branch.jaxpr for branch in eqn.params["branches"]]


def collectives(jaxpr) -> set[tuple[str, str]]:
    """Names of the collectives, each with an axis that it goes over."""
    named = ((e.primitive.name, axis) for e in equations(jaxpr) for axis in axes_named(e))
    return {(name, axis) for name, axis in named if name not in SILENT}


def axes_named(eqn):
    """Mesh axes that an equation names, in whichever parameter."""
    for value in eqn.params.values():
        values = value if isinstance(value, tuple) else (value,)
        yield from (axis for axis in AXES if any(isinstance(a, str) and a == axis for a in values))


#: A tensor axis of two devices.
TENSOR_2 = {"parallel.tensor": 2}


EXPERTS = Experts(expert=Glu(80), num_experts=4, experts_per_token=2)

NORM_AND_BIASES = {
    "model.layers.mixer.qk_norm": QkNorm(),
    "model.layers.mixer.bias": True,
    "model.layers.feed_forward.bias": True,
}

#: Matmuls in float8, whose sides are multiples of 16 on each device.
FLOAT8 = {
    "compute.matmul_dtype": "float8",
    "model.layers.mixer.head_dim": 16,
    "model.layers.feed_forward.d_ff": 96,
    "data.seq_len": 32,
}


@pytest.mark.parametrize(
    "fields",
    [
        slow({}),
        slow({"parallel.data": 2}),
        {"parallel.pipeline_save": "inputs"},
        slow(TENSOR_2),
        TENSOR_2 | {"parallel.data": 2, "parallel.row_groups": 2, "parallel.num_microbatches": 2},
        TENSOR_2 | {"parallel.pipeline_save": "inputs", "parallel.remat": "full"},
        slow(TENSOR_2 | {"parallel.layer_loop": "scan"}),
        slow(TENSOR_2 | {"model.layers.feed_forward": EXPERTS}),
        slow(TENSOR_2 | {"lora.rank": 2}),
        slow(TENSOR_2 | NORM_AND_BIASES),
        slow(TENSOR_2 | FLOAT8),
    ],
    ids=lambda fields: " ".join(name.partition(".")[2] for name in fields),
)
def test_what_a_branch_that_stages_choose_sends_stays_within_a_stage(fields, devices):
    """Anything else would wait for stages that took another one; so would a permute, to which XLA
    has all devices of the program come."""
    n = 2 * fields.get("parallel.data", 1) * fields.get("parallel.tensor", 1)
    cfg = config(n, **fields)
    jaxpr = traced(cfg, devices[:n])
    within = {("all_to_all", "tensor")} if cfg.parallel.tensor > 1 else set()
    # The gradients of experts are added up over `sequence`, whose devices are of one stage.
    sums = {("psum_invariant", "sequence")} if "model.layers.feed_forward" in fields else set()
    found = list(chosen_by_stage(jaxpr, cfg.parallel.virtual_stages + 1))
    assert len(found) == 2, "one for the forward and one for the backward"
    for branches in found:
        work, idle = branches[:-1], branches[-1]
        assert all(sum(e.primitive.name == "dot_general" for e in equations(b)) for b in work)
        assert all(within <= collectives(branch) <= within | sums for branch in work)
        assert not idle.eqns
    assert ("ppermute", "pipeline") in collectives(jaxpr), "this test would see one"


def test_a_branch_of_a_zero_bubble_schedule_sends_nothing(devices):
    """A forward or nothing, a backward with or without weight gradients or nothing."""
    fields = {"parallel.virtual_stages": 1, "parallel.schedule": "zero_bubble"}
    jaxpr = traced(config(2, **fields), devices[:2])
    (backwards,) = chosen_by_stage(jaxpr, 3)
    matmuls = [sum(e.primitive.name == "dot_general" for e in equations(b)) for b in backwards]
    assert matmuls[0] > matmuls[1] > matmuls[2] == 0
    assert not any(map(collectives, backwards))


@pytest.mark.parametrize("tensor", [slow(1), 2])
@pytest.mark.parametrize("fields", [{"parallel.sequence": 2}, {"parallel.zero": 3}])
def test_chunks_that_send_further_are_not_run_in_a_branch(fields, tensor, devices):
    fields = fields | ({"parallel.data": 2} if "parallel.zero" in fields else {})
    n = 4 * tensor
    jaxpr = traced(config(n, **fields, **{"parallel.tensor": tensor}), devices[:n])
    assert not list(chosen_by_stage(jaxpr, BASE.parallel.virtual_stages + 1))


def test_without_stages_pieces_go_over_tensor_by_permutes(devices):
    """Copy engines move them; all devices come to them anyway."""
    whole = {"parallel.pipeline": 1, "parallel.virtual_stages": 1, "parallel.tensor": 2}
    found = collectives(traced(config(2, **whole), devices[:2]))
    assert ("ppermute", "tensor") in found and ("all_to_all", "tensor") not in found


@pytest.mark.slow
@pytest.mark.parametrize("save", ["residuals", "inputs"])
@pytest.mark.parametrize(
    ("virtual", "tensor", "schedule", "slots"),
    [
        (1, 1, "1f1b", {3}),
        (2, 1, "1f1b", {7}),
        (2, 2, "1f1b", {7}),
        (1, 1, "zero_bubble", {3, 2}),  # of the stash, and of postponed weight gradients
    ],
)
def test_what_the_ring_begins_with_is_never_read(
    virtual, save, tensor, schedule, slots, devices, monkeypatch
):
    """On a GPU it is whatever lies there; here it is NaN."""
    fields = {"virtual_stages": virtual, "pipeline_save": save, "tensor": tensor}
    fields["schedule"] = schedule
    cfg = config(2 * tensor, **{f"parallel.{name}": value for name, value in fields.items()})
    mesh = make_mesh(cfg.parallel, devices[: 2 * tensor])
    params = init_state(cfg, mesh).params
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    _, wanted = train_step.make_gradient_step(cfg, mesh)(params, batch)

    filled = []

    def full_of_nan(shape, dtype):
        filled.append(shape)
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 7, dtype)

    monkeypatch.setattr(lax, "empty", full_of_nan)
    measured, found = train_step.make_gradient_step(cfg, mesh)(params, batch)
    assert {shape[0] for shape in filled} == slots
    assert np.isfinite(measured["loss"])
    assert not distances.differing_arrays(traces.to_host(found), traces.to_host(wanted))


@pytest.mark.parametrize(
    ("fields", "devices_used", "loops"),
    [
        slow({}, 2, 1),
        slow({"parallel.tensor": 2, "parallel.row_groups": 2}, 4, 1),
        slow({"parallel.virtual_stages": 1, "parallel.sequence": 2}, 4, 2),
        ({"parallel.pipeline": 1, "parallel.virtual_stages": 1, "parallel.data": 2}, 2, 1),
    ],
    ids=["interleaved", "tensor, rows in turns", "sequence", "accumulation"],
)
def test_gradients_that_are_added_up_leave_the_matmul_in_float32(
    fields, devices_used, loops, devices
):
    """loops: those with a backward in them."""
    cfg = config(devices_used, **fields, **{"compute.dtype": "bfloat16"})
    jaxpr = traced(cfg, devices[:devices_used])
    D, F = cfg.model.d_model, cfg.model.layers[0].feed_forward.d_ff // cfg.parallel.tensor
    made = [e.outvars[0].aval for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    of_weights = [out for out in made if out.shape in {(D, F), (F, D), (D, 2 * F), (2 * F, D)}]
    layers = cfg.model.num_layers // cfg.parallel.pipeline
    matrices = 2 if execution_of(cfg).fused_gate_up else 3
    assert len(of_weights) == matrices * layers * cfg.parallel.row_groups * loops
    assert {out.dtype for out in of_weights} == {jnp.dtype(jnp.float32)}


def test_each_gradient_of_a_weight_is_added_to_the_sum_by_itself():
    """Not first to those of other rows: a matmul adds what it makes to one array."""
    total, parts = jnp.float32(1), (jnp.float32(2.0**-24), jnp.float32(2.0**-24))
    assert (
        add_gradient(total, Float32GradientWeight(None, parts)) == 1
    )  # their sum, 2**-23, would have changed it
    assert add_gradient(total, parts[0] + parts[1]) > 1


def test_a_gradient_stands_on_the_left_of_the_sum():
    """There XLA looks for the matmul that is to add; on the right it found the one before."""
    jaxpr = jax.make_jaxpr(lambda t, *g: add_gradient(t, Float32GradientWeight(None, g)))(
        *[jnp.float32(0)] * 3
    ).jaxpr
    total, *parts = jaxpr.invars
    first, second = (e for e in jaxpr.eqns if e.primitive.name == "add")
    assert first.invars == [parts[0], total] and second.invars == [parts[1], *first.outvars]


def test_opened_weights():
    """Closed, they hold no zeros, and opened again they are what they were."""
    w = {"wo": jnp.ones((2, 3), jnp.bfloat16), "attn_norm": jnp.ones(2)}
    cfg = config(1, **{"parallel.pipeline": 1, "parallel.virtual_stages": 1})
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])

    def shapes(w):
        open_ = attach_buffers(w, ("wo", "w_up"), uses=2)
        again = reattach_buffers(detach_buffers(open_))
        assert jax.tree.map(jnp.shape, again) == jax.tree.map(jnp.shape, open_)
        assert [a.dtype for a in open_["wo"].gradients] == [jnp.float32] * 2
        assert len(jax.tree.leaves(detach_buffers(open_))) == len(jax.tree.leaves(w)) == 2
        assert len(buffers_of_use(open_, 1)["wo"].gradients) == 1
        assert only_gradients(open_)["wo"].values is None
        return w

    one = PartitionSpec()
    jax.eval_shape(jax.shard_map(shapes, mesh=mesh, in_specs=one, out_specs=one), w)
