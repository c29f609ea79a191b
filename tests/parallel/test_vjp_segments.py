"""Layers one by one: gradients added up, and a pipeline's values written, before the next begins.

XLA would put off to the end what nothing waits for, and keep in memory what that reads.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpar.certification import distances, small_config, traces
from jaxpar.config import Attention, Config, Experts, Glu, Layer, Model, replace
from jaxpar.config.validate import resolve
from jaxpar.execution import decisions
from jaxpar.execution.decisions import execution_of
from jaxpar.sharding.batch import Batch
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import train_step
from jaxpar.step.state import abstract_state
from tests import weights
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

LAYERS = 4

BLOCK = Layer("layers", Attention(num_heads=4, num_kv_heads=4, head_dim=8), Glu(64))
_LOCAL = dataclasses.replace(BLOCK.mixer, window=8)
WINDOWS = {"model.layers": [Layer("local", _LOCAL, BLOCK.feed_forward), BLOCK] * (LAYERS // 2)}
EXPERTS = {"model.layers.feed_forward": Experts(expert=Glu(64), num_experts=4, experts_per_token=2)}

BASE = {
    "model": Model(d_model=32, vocab_size=128, layers=[BLOCK] * LAYERS),
    "data.seq_len": 64,
    "train.global_batch_size": 8,
    "parallel.num_microbatches": 4,
    "parallel.layer_loop": "unroll",
    "parallel.zero": 1,
}

ACCUMULATED = {"parallel.data": 2}
PIPELINE = {"parallel.data": 1, "parallel.pipeline": 2}


def config(**fields) -> Config:
    return resolve(replace(small_config.float32(Config()), **(BASE | fields)), 2)


def all_at_once(monkeypatch) -> None:
    chosen = decisions.execution_of
    at_once = lambda cfg: dataclasses.replace(chosen(cfg), layers_per_vjp=0)  # noqa: E731
    monkeypatch.setattr(train_step, "execution_of", at_once)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        (ACCUMULATED, 1),
        (PIPELINE, 1),
        (PIPELINE | {"parallel.pipeline_save": "inputs"}, 1),
        ({"parallel.tensor": 2, "parallel.data": 1}, 1),
        (ACCUMULATED | WINDOWS, 2),
        (ACCUMULATED | {"parallel.zero": 3}, 0),  # gathered a layer ahead
        ({"parallel.data": 1, "parallel.sequence": 2}, 0),
        (ACCUMULATED | {"parallel.remat": "dots_offload"}, 0),  # fetched a layer ahead
        (ACCUMULATED | {"parallel.layer_loop": "scan"}, 0),
        ({"parallel.tensor": 2, "parallel.data": 1, "parallel.row_groups": 2}, 0),
    ],
)
def test_how_many_layers_at_a_time(fields, layers):
    assert execution_of(config(**fields)).layers_per_vjp == layers


def gradient_step(cfg: Config, devices):
    """The step, and what it takes, as types."""
    mesh = make_mesh(cfg.parallel, devices[:2])
    ints = jax.ShapeDtypeStruct((cfg.train.global_batch_size, cfg.data.seq_len), jnp.int32)
    params = abstract_state(cfg).params
    return train_step.make_gradient_step(cfg, mesh), params, Batch(ints, ints, ints, ints)


def equations(jaxpr):
    """All equations of a jaxpr, those of its inner ones among them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(getattr(inner, "jaxpr", inner))


def barriers_over_sums(cfg: Config, devices) -> int:
    """Barriers that the sum of a down projection's gradient goes through, beside something else.

    Args:     cfg: of bfloat16 weights, so that a float32 matrix is a sum.
    """
    run, *given = gradient_step(cfg, devices)
    shape = (BLOCK.feed_forward.d_ff // cfg.parallel.tensor, cfg.model.d_model)
    held = 0
    for eqn in equations(jax.make_jaxpr(run)(*given).jaxpr):
        if eqn.primitive is lax.optimization_barrier_p:
            through = [(v.aval.shape, v.aval.dtype) for v in eqn.invars]
            held += (shape, jnp.float32) in through and len(through) > 1
    return held


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        (ACCUMULATED, LAYERS - 1),
        slow({"parallel.tensor": 2, "parallel.data": 1}, LAYERS - 1),
        slow(ACCUMULATED | WINDOWS, LAYERS // 2 - 1),
        slow(PIPELINE | {"parallel.pipeline_save": "inputs"}, LAYERS // 2 - 1),
    ],
)
def test_a_layers_gradients_are_added_before_the_next_layers_backward(
    fields, held, devices, monkeypatch
):
    cfg = config(**fields, **{"compute.dtype": "bfloat16"})
    assert barriers_over_sums(cfg, devices) == held
    all_at_once(monkeypatch)
    assert barriers_over_sums(cfg, devices) == 0


@pytest.mark.slow  # quicker: test_pipeline_memory.py
def test_a_pipelines_memory_with_layers_one_by_one(devices, monkeypatch):
    """What is recomputed of a layer does not outlive it."""

    def temporary() -> int:
        run, *given = gradient_step(config(**PIPELINE, **{"parallel.remat": "full"}), devices)
        return run.lower(*given).compile().memory_analysis().temp_size_in_bytes

    one_by_one = temporary()
    all_at_once(monkeypatch)
    assert one_by_one < 0.8 * temporary()


@pytest.mark.parametrize(
    "fields",
    [
        slow(ACCUMULATED | {"model.tie_embeddings": True, "parallel.remat": "full"}),
        slow(ACCUMULATED | EXPERTS),
        slow(PIPELINE | {"parallel.remat": "full", "lora.rank": 2}),
        slow(PIPELINE | WINDOWS),
    ],
)
def test_the_same_gradients_as_all_layers_at_once(fields, devices, monkeypatch):
    """That they are those of the plain model, tests/meshes/test_meshes.py sees."""
    cfg = config(**fields)
    mesh, batch = make_mesh(cfg.parallel, devices[:2]), traces.random_batch(cfg)
    found = weights.first_gradients(cfg, mesh, batch)
    all_at_once(monkeypatch)
    wanted = weights.first_gradients(cfg, mesh, batch)
    assert not distances.compare(found, wanted, 1e-5).mismatches()
