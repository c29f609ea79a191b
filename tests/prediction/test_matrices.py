"""What the planner predicts of whole matrices, against the program of an update."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.monitoring.hlo import collective_bytes
from jaxpar.optimizer.muon import orthogonalize
from jaxpar.prediction import matrices
from jaxpar.prediction.communication import Cluster, traffic_of
from jaxpar.prediction.compute import optimizer_seconds
from jaxpar.prediction.hardware import H200, NETWORKS
from jaxpar.prediction.memory import memory_of
from jaxpar.prediction.shard import shard_of, state_bytes
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.state import abstract_state, state_shardings
from tests.optimizer.updates import update_step
from tests.tiny import EXPERTS, TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

MUON = replace(TINY, **{"optimizer.name": "muon", "optimizer.muon_dtype": "float32"})


def on(mesh: str, **fields):
    parallel = parse_meshes([mesh], MUON.parallel)[mesh]
    return resolve(replace(MUON, parallel=parallel, **fields), math.prod(axis_sizes(parallel)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("replica=2,data=2,tensor=2", {}),
        ("pipeline=2,data=2,sequence=2,num_microbatches=2", {"model.num_layers": 6}),
        ("data=2,expert=2,tensor=2", {"model.layers.feed_forward": EXPERTS}),
    ],
)
def test_bytes_sent_are_those_of_the_program(mesh, fields, devices):
    cfg = on(mesh, **fields)
    here = make_mesh(cfg.parallel, devices[: math.prod(axis_sizes(cfg.parallel))])
    state = abstract_state(cfg)
    placed = jax.tree.map(
        lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to),
        state,
        state_shardings(cfg, here),
    )
    program = update_step(cfg, here).lower(placed, placed.params).compile()
    kinds = collective_bytes(program.as_text()).kinds
    sent = [matrices.sent_bytes(one, cfg) for one in matrices.exchanged_of(cfg)]
    traded, gathered = map(sum, zip(*sent, strict=True))
    assert kinds["all-to-all"]["bytes"] == traded > 0
    assert kinds.get("all-gather", {"bytes": 0})["bytes"] == gathered
    assert (gathered > 0) == (cfg.parallel.replica > 1)


def test_flops_are_those_of_the_products():
    one = matrices.exchanged_of(on("data=1"))[0]
    x = jnp.zeros((one.count, one.rows, one.columns))
    jaxpr = jax.make_jaxpr(lambda x: orthogonalize(x, 5, 1e-8))(x)
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
            found += 2 * inner * eqn.outvars[0].aval.size
    assert found == one.flops(5)


def test_the_planner_knows_time_memory_and_bytes():
    muon = on("data=2,tensor=2")
    adamw = replace(muon, **{"optimizer.name": "adamw"})
    assert not matrices.exchanged_of(adamw) and matrices.iteration_flops(adamw) == 0
    assert state_bytes(muon)[1] < state_bytes(adamw)[1]
    assert optimizer_seconds(muon, shard_of(muon), H200) > matrices.iteration_seconds(muon, H200)
    cluster = Cluster(H200, NETWORKS["ib400"], 4, 8)
    axes = {t.axis for t in traffic_of(muon, shard_of(muon), cluster)}
    assert axes - {t.axis for t in traffic_of(adamw, shard_of(adamw), cluster)} == {"matrices"}
    few_tokens = {"data.seq_len": 8, "parallel.remat": "full"}
    many = replace(
        muon, **{"model.num_layers": 64, "model.layers.feed_forward.d_ff": 4096}, **few_tokens
    )
    assert memory_of(many).moment == "update"
    assert memory_of(many).buffers == matrices.update_bytes(many)


def test_the_work_is_shared_by_all_devices():
    alone, shared = (
        matrices.iteration_flops(on(mesh, **{"model.num_layers": 8}))
        for mesh in ("data=1", "replica=2,data=2,tensor=2")
    )
    assert shared == alone / 8
