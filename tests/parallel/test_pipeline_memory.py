"""1F1B's promise: memory does not grow with the number of microbatches, as GPipe's does.

Read off the compiler's own plan of temporary buffers; nothing is run for it. GPipe here is what a
pipeline is without a backward placed by hand: autodiff through a loop over ticks.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.model import transformer
from jaxpar.parallel.collectives import shift, varying
from jaxpar.parallel.pipeline import runner
from jaxpar.parallel.staged_model import take
from jaxpar.sharding.axes import BATCH_SPEC, PIPELINE
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh, shardings
from jaxpar.step import train_step
from jaxpar.step.state import abstract_state, init_state, state_specs
from jaxpar.verification import distances, traces
from tests import weights
from tests.slow import slow
from tests.tiny import SMALL

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

BASE = replace(
    SMALL,
    **{
        "model.num_kv_heads": 4,
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


def gpipe(model, weights, _frozen, microbatches, scale):
    """All forwards, then all backwards: what differentiating a loop over ticks amounts to."""
    P, s = lax.axis_size(PIPELINE), lax.axis_index(PIPELINE)
    M = len(microbatches.tokens)
    at = lambda m: take(microbatches, jnp.clip(m, 0, M - 1))  # noqa: E731

    def run(w):
        (chunk,) = w["layers"]

        def tick(x, t):
            x = jnp.where(s == 0, model.embed(w["top"], at(t)), x)
            y, _ = model.stage(chunk, x, model.context(at(t - s)), {})
            loss = model.head(w["top"], y, at(t - (P - 1)))
            return shift(y, PIPELINE, 1), loss

        blank = varying(jnp.zeros_like(model.embed(w["top"], at(0))))
        _, losses = lax.scan(tick, blank, jnp.arange(M + P - 1))
        return jax.tree.map(lambda a: jnp.sum(a[P - 1 :]), losses)

    sums, vjp = jax.vjp(run, weights)
    (grads,) = vjp((jnp.ones_like(sums[0]) * scale, jnp.zeros_like(sums[1])))
    return sums, grads


@pytest.fixture(scope="module")
def mesh(devices):
    return make_mesh(BASE.parallel, devices[:2])


MICROBATCHES = (4, 8, 16)


def use_gpipe(monkeypatch) -> None:
    monkeypatch.setattr(train_step, "schedule_of", lambda cfg: gpipe)


@pytest.mark.parametrize("save", ["residuals", slow("inputs")])
def test_memory_is_flat_in_microbatches(save, mesh):
    fields = {"parallel.pipeline_save": save}
    sizes = [temporary_bytes(config(M, **fields), mesh) for M in MICROBATCHES]
    assert max(sizes) < 1.01 * min(sizes), sizes


@pytest.mark.slow
def test_memory_of_gpipe_grows(mesh, monkeypatch):
    flat = temporary_bytes(config(16), mesh)
    use_gpipe(monkeypatch)
    few, more, most = (temporary_bytes(config(M), mesh) for M in MICROBATCHES)
    stream = ROWS * BASE.data.seq_len * BASE.model.d_model * 4  # one microbatch's activations
    assert more - few > 4 * stream and most - more > 8 * stream, (few, more, most)
    assert most > 2 * flat


def gradients(cfg: Config, mesh) -> traces.TrainingTrace:
    """Of a random batch, with its loss."""
    return weights.first_gradients(cfg, mesh, traces.random_batch(cfg))


@pytest.mark.slow
def test_gpipe_computes_the_same(mesh, monkeypatch):
    """So that the test above compares two ways of one computation."""
    found = gradients(config(4), mesh)
    use_gpipe(monkeypatch)
    assert not distances.compare(found, gradients(config(4), mesh), 1e-5).mismatches()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        slow({"parallel.sequence": 2, "parallel.virtual_stages": 2}),
        slow({"parallel.data": 2, "parallel.zero": 3}),
    ],
)
def test_what_lies_in_the_ring_before_its_first_value_is_never_used(fields, devices, monkeypatch):
    """It is memory as it was found: here it holds no numbers."""
    cfg = resolve(replace(config(4), **fields), 4 if fields else 2)
    mesh = make_mesh(cfg.parallel, devices[: 4 if fields else 2])
    found = gradients(cfg, mesh)

    def nothing(shape, dtype):
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 12345, dtype)

    monkeypatch.setattr(runner.lax, "empty", nothing)
    wanted = gradients(cfg, mesh)
    assert found.loss == wanted.loss
    assert not distances.differing_arrays(found.gradients, wanted.gradients)


@pytest.mark.parametrize("virtual", [1, 2])
def test_evaluation_takes_the_head_once_for_each_microbatch(virtual, mesh, monkeypatch):
    taken, head = [], transformer.head

    def counted(top, x, batch, cfg):
        sums = head(top, x, batch, cfg)
        jax.debug.callback(taken.append, jax.lax.axis_index(PIPELINE))
        return sums

    monkeypatch.setattr(transformer, "head", counted)
    cfg = config(4, **{"parallel.virtual_stages": virtual, "parallel.zero": 1})
    batch = traces.place_batch(traces.random_batch(cfg), cfg, mesh)
    jax.block_until_ready(train_step.make_eval_step(cfg, mesh)(init_state(cfg, mesh).params, batch))
    jax.effects_barrier()
    assert sorted(map(int, taken)) == [0] * 4 + [1] * 4
