"""1F1B's promise: memory does not grow with the number of microbatches, as GPipe's does.

Read off the compiler's own plan of temporary buffers; nothing is run for it.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.certification import distances, traces
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.model import transformer
from jaxpar.parallel.pipeline import slots
from jaxpar.prediction.memory import memory_of
from jaxpar.sharding.axes import BATCH_SPEC, PIPELINE
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh, shardings
from jaxpar.step import train_step
from jaxpar.step.state import abstract_state, init_state, state_specs
from tests import weights
from tests.slow import slow
from tests.tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

BASE = replace(
    SMALL,
    **{
        "model.layers.mixer.num_kv_heads": 4,
        "model.init_std": 0.2,
        "data.seq_len": 64,
        "parallel.pipeline": 2,
    },
)

ROWS = 2
"""Sequences in a microbatch, whatever the number of microbatches."""


def config(num_microbatches: int, **fields) -> Config:
    size = {"train.global_batch_size": ROWS * num_microbatches}
    cfg = replace(BASE, **{"parallel.num_microbatches": num_microbatches}, **size, **fields)
    return resolve(cfg, 2)


def temporary_bytes(cfg: Config, mesh) -> int:
    """Temporary memory of one device in the compiled gradient step."""
    abstract = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    specs = state_specs(cfg).params
    params = jax.tree.map(abstract, abstract_state(cfg).params, shardings(mesh, specs))
    to = jax.sharding.NamedSharding(mesh, BATCH_SPEC)
    ints = jax.ShapeDtypeStruct(
        (cfg.train.global_batch_size, cfg.data.seq_len), jnp.int32, sharding=to
    )
    lowered = train_step.make_gradient_step(cfg, mesh).lower(params, Batch(ints, ints, ints, ints))
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def mesh(devices):
    return make_mesh(BASE.parallel, devices[:2])


MICROBATCHES = (4, 16)


GPIPE = {"parallel.schedule": "gpipe"}
UNROLLED = {"parallel.layer_loop": "unroll", "parallel.zero": 1}


@pytest.mark.slow  # quicker: test_schedules.py
@pytest.mark.parametrize("save", ["residuals", "inputs"])
def test_memory_is_flat_in_microbatches(save, mesh):
    fields = {"parallel.pipeline_save": save}
    sizes = [temporary_bytes(config(M, **fields), mesh) for M in MICROBATCHES]
    assert max(sizes) < 1.01 * min(sizes), sizes


@pytest.mark.slow
@pytest.mark.parametrize("save", ["residuals", "inputs"])
@pytest.mark.parametrize("fields", [{}, UNROLLED | {"parallel.remat": "full"}])
def test_memory_of_gpipe_grows_with_every_microbatch(save, fields, mesh):
    """By as much as the planner says."""
    fields = {"parallel.pipeline_save": save} | fields
    few, more = (config(M, **GPIPE, **fields) for M in (8, 16))
    most = temporary_bytes(more, mesh)
    grown = memory_of(more).activations - memory_of(few).activations
    assert most - temporary_bytes(few, mesh) == pytest.approx(grown, rel=0.03)
    assert most > temporary_bytes(config(16, **fields), mesh) + grown / 2


def gradients(cfg: Config, mesh) -> traces.TrainingTrace:
    """Of a random batch, with its loss."""
    return weights.first_gradients(cfg, mesh, traces.random_batch(cfg))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [UNROLLED, {"parallel.sequence": 2}, {"parallel.pipeline_save": "inputs"}]
)
def test_gpipe_computes_the_same(fields, devices):
    """To the last bit: each sum adds the same gradients in the same order."""
    n = 2 * fields.get("parallel.sequence", 1)
    cfg = resolve(replace(config(4), **fields), n)
    mesh = make_mesh(cfg.parallel, devices[:n])
    wanted, found = gradients(cfg, mesh), gradients(replace(cfg, **GPIPE), mesh)
    assert found.loss == wanted.loss
    assert not distances.differing_arrays(found.gradients, wanted.gradients)


@pytest.mark.parametrize(
    "fields",
    [
        slow({}),
        slow({"parallel.sequence": 2, "parallel.virtual_stages": 2}),
        slow({"parallel.data": 2, "parallel.zero": 3}),
        slow(GPIPE),
        slow(GPIPE | {"parallel.sequence": 2}),
    ],
)
def test_what_lies_in_the_ring_before_its_first_value_is_never_used(fields, devices, monkeypatch):
    """It is memory as it was found: here it holds no numbers."""
    n = 2 * fields.get("parallel.sequence", 1) * fields.get("parallel.data", 1)
    cfg = resolve(replace(config(4), **fields), n)
    mesh = make_mesh(cfg.parallel, devices[:n])
    found = gradients(cfg, mesh)

    def nothing(shape, dtype):
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 12345, dtype)

    monkeypatch.setattr(slots.lax, "empty", nothing)
    wanted = gradients(cfg, mesh)
    assert found.loss == wanted.loss
    assert not distances.differing_arrays(found.gradients, wanted.gradients)


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [1, 2])
def test_evaluation_takes_the_head_once_for_each_microbatch(virtual, mesh, monkeypatch):
    taken, head = [], transformer.head

    def counted(top, x, batch, **more):
        sums = head(top, x, batch, **more)
        jax.debug.callback(taken.append, jax.lax.axis_index(PIPELINE))
        return sums

    monkeypatch.setattr(transformer, "head", counted)
    cfg = config(4, **{"parallel.virtual_stages": virtual, "parallel.zero": 1})
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    jax.block_until_ready(train_step.make_eval_step(cfg, mesh)(init_state(cfg, mesh).params, batch))
    jax.effects_barrier()
    assert sorted(map(int, taken)) == [0] * 4 + [1] * 4
