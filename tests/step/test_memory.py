"""The state is never there twice: read off the compiler's plan of memory."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jaxpar.certification import traces
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.validate import resolve
from jaxpar.model.flops import num_params
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.compiled import memory_of
from jaxpar.step.state import (
    TrainState,
    abstract_state,
    bytes_per_device,
    init_state,
    state_shardings,
)
from jaxpar.step.train_step import make_train_step
from jaxpar.training import run
from tests.slow import slow, slow_but
from tests.tiny import SMALL, remat_of

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

BASE = SMALL

BFLOAT16 = {
    "optimizer.first_moment_dtype": "bfloat16",
    "optimizer.second_moment_dtype": "bfloat16",
}
SHARDED = {"parallel.data": 2, "parallel.tensor": 2}
STAGES = {"parallel.pipeline": 2, "parallel.num_microbatches": 2, "parallel.zero": 1}
VIRTUAL = STAGES | {"parallel.virtual_stages": 2}


def ready(devices, **fields):
    """A resolved config and its mesh."""
    cfg = replace(BASE, **fields)
    p = cfg.parallel
    n = p.pipeline * p.replica * p.data * p.expert * p.sequence * p.tensor
    return resolve(cfg, n), make_mesh(p, devices[:n])


def abstract(cfg: Config, mesh) -> TrainState:
    """The state's arrays with their shardings."""
    sharded = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    return jax.tree.map(sharded, abstract_state(cfg), state_shardings(cfg, mesh))


def compiled_step(cfg: Config, mesh):
    """The real train step, compiled for abstract arguments."""
    shape = (cfg.train.global_batch_size, cfg.data.seq_len)
    ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    lowered = make_train_step(cfg, mesh).lower(abstract(cfg, mesh), Batch(ints, ints, ints, ints))
    return lowered.compile(traces.QUICK_COMPILE)


# ----------------------------------------------------------------------------- donation

STEPS = {
    "one device": {},
    "lion": {"optimizer.name": "lion", **SHARDED},
    "sgd": {"optimizer.name": "sgd", "parallel.layer_loop": "unroll"},
    "bfloat16 moments": {**BFLOAT16, **SHARDED},
    "lion, bfloat16": {"optimizer.name": "lion", "optimizer.first_moment_dtype": "bfloat16"},
    "offloaded": {"optimizer.offload": True, **SHARDED},
    "ZeRO-3, unrolled": {**SHARDED, "parallel.layer_loop": "unroll"},
    "ZeRO-1": {**SHARDED, "parallel.zero": 1},
    "replicas, sequence": {"parallel.replica": 2, "parallel.sequence": 2, "parallel.data": 2},
    "stages": STAGES,
    "virtual stages": VIRTUAL,
    "virtual stages, offloaded": {**VIRTUAL, **BFLOAT16, "optimizer.offload": True},
}


@pytest.mark.parametrize("name", slow_but(["stages"], STEPS))
def test_the_step_takes_over_every_byte_of_the_state(devices, name):
    cfg, mesh = ready(devices, **STEPS[name])
    state, memory = abstract(cfg, mesh), compiled_step(cfg, mesh).memory_analysis()
    taken_over = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    assert taken_over == bytes_per_device(state)
    whole = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
    assert whole / mesh.size <= taken_over < 1.1 * whole / (mesh.size // cfg.parallel.replica)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [slow(SHARDED), slow(VIRTUAL), {"optimizer.offload": True}])
def test_after_a_step_the_old_state_is_gone(devices, fields):
    cfg, mesh = ready(devices, **fields)
    state = init_state(cfg, mesh)
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    step = make_train_step(cfg, mesh).lower(state, batch).compile(traces.QUICK_COMPILE)
    for _ in range(2):
        old, (state, _) = state, step(state, batch)
        assert all(a.is_deleted() for a in jax.tree.leaves(old))
    assert not any(a.is_deleted() for a in jax.tree.leaves(state))


def test_a_program_that_holds_the_state_twice_is_reported(devices):
    cfg, mesh = ready(devices)
    state = abstract(cfg, mesh)
    grown = lambda s: jax.tree.map(lambda a: a + 1, s)  # noqa: E731
    given, kept = (jax.jit(grown, donate_argnums=n).lower(state).compile() for n in (0, ()))
    assert memory_of(given, state).startswith(", ")
    assert "WARNING" not in memory_of(given, state)
    twice = bytes_per_device(state) / 2**30
    assert f"\nWARNING    the step keeps two copies of {twice:.3f} GiB" in memory_of(kept, state)


@pytest.mark.parametrize("remat", ["offload", "attn_out:host,attn_lse"])
def test_deterministic_kernels_and_values_on_the_host_are_refused_on_gpus(remat, monkeypatch):
    cfg = replace(Config(), **{"parallel.remat": remat_of(remat), "parallel.layer_loop": "unroll"})
    monkeypatch.setenv("XLA_FLAGS", "")
    run.check_host_copies(cfg, "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    with pytest.raises(ConfigError, match=r"parallel\.layer_loop = .*layer-loop scan"):
        run.check_host_copies(cfg, "gpu")
    run.check_host_copies(cfg, "cpu")
    run.check_host_copies(replace(cfg, **{"parallel.layer_loop": "scan"}), "gpu")
    run.check_host_copies(replace(cfg, **{"parallel.remat": "attn_out"}), "gpu")


@pytest.mark.slow
def test_zero_2_sums_the_gradients_of_shards(devices):
    """ZeRO-1's float32 sums are complete; three quarters of them are missing here."""
    fields = {"parallel.data": 4, "parallel.num_microbatches": 2, "train.global_batch_size": 16}
    size = {"model.d_model": 128, "model.layers.feed_forward.d_ff": 512}
    temporary, parameters = {}, 0
    for zero in (1, 2):
        cfg, mesh = ready(devices, **fields, **size, **{"parallel.zero": zero})
        temporary[zero] = compiled_step(cfg, mesh).memory_analysis().temp_size_in_bytes
        parameters = num_params(cfg.model)
    assert temporary[1] - temporary[2] > 0.75 * 4 * 0.75 * parameters, (temporary, parameters)
