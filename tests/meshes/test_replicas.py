"""Training with compressed sums over replicas: a step's sum and errors are the gradients.

`tests/parallel/test_replicas.py` compares the sums alone with those of whole arrays, in less time.
"""

import functools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxpar import checkpoint
from jaxpar.checkpoint import Checkpointer
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import specs_of
from jaxpar.optimizer.rules import make_optimizer
from jaxpar.parallel.replicas.power_sgd import dims_of
from jaxpar.sharding.batch import IGNORED, Batch
from jaxpar.sharding.initial_values import initialize
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import feedback_of, init_state, to_logical
from jaxpar.step.train_step import make_gradient_step, make_train_step
from jaxpar.verification import distances, small_config, traces
from jaxpar.verification.meshes import parse_meshes
from tests.checkpoint.test_checkpoint import assert_same_bits, write_dataset
from tests.parallel import replicas_reference as plain
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

STEPS = 3

#: Its update is the gradient.
SGD = {
    "optimizer.name": "sgd",
    "optimizer.beta1": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.0,
    "optimizer.schedule": "constant",
    "optimizer.learning_rate": 1.0,
}

EXPERTS = {"model.num_experts": 4, "model.experts_per_token": 2}


def on_mesh(mesh: str, method: str, devices, **fields: Any) -> tuple[Config, jax.sharding.Mesh]:
    (parallel,) = parse_meshes([mesh], TINY.parallel).values()
    n = math.prod(axis_sizes(parallel))
    cfg = small_config.steady(replace(TINY, parallel=parallel))
    own = {"parallel.replica_reduction": method, "parallel.replica_top_k": 0.2}
    cfg = resolve(replace(cfg, **own | fields), n)
    return cfg, make_mesh(cfg.parallel, devices[:n])


def logical_errors(state: Any, cfg: Config) -> dict[str, np.ndarray]:
    """Sums of errors over replicas, by parameter."""
    found = flat(jax.device_get(to_logical(state, cfg)).feedback["errors"])
    specs = flat(feedback_of(cfg)["errors"])
    return {name: a.sum(specs[name].axes.index("replica")) for name, a in found.items()}


@pytest.mark.parametrize(
    ("mesh", "method", "more"),
    [
        ("replica=2,data=2,zero=2", "int8", {}),
        slow("replica=2,data=2,num_microbatches=2,zero=2", "int8", {}),
        slow("replica=2,data=2,tensor=2", "top_k", {"model.dtype": "float16"}),
        slow("replica=2,data=2,expert=2", "int8", EXPERTS),
        slow("replica=4,sequence=2,num_microbatches=2,zero=1", "power_sgd", {}),
        slow("pipeline=2,replica=2,num_microbatches=2,layer_loop=unroll", "top_k", {}),
        slow("pipeline=2,replica=2,num_microbatches=4,virtual_stages=2,zero=1", "int8", {}),
        slow("replica=2,data=2", "int8", {"lora.rank": 3}),
    ],
)
def test_what_was_sent_and_what_was_left_out_are_the_gradient(
    mesh, method, more, devices, tmp_path
):
    layers = {"model.num_layers": 4} if "pipeline" in mesh else {}
    places = {"data.path": write_dataset(tmp_path / "data"), "run.dir": str(tmp_path / "run")}
    cfg, here = on_mesh(mesh, method, devices, **SGD | places | layers | more)
    most = traces.max_segments(cfg)
    gradients, step = make_gradient_step(cfg, here, most), make_train_step(cfg, here, most)
    batches = [traces.place_batch(traces.random_batch(cfg, i), cfg, here) for i in range(STEPS)]
    state = init_state(cfg, here)
    before = {name: 0.0 for name in logical_errors(state, cfg)}
    for i, batch in enumerate(batches):
        scale = state.guard["loss_scale"]
        start = traces.logical(state.params, cfg)
        wanted = traces.logical(gradients(state.params, batch)[1], cfg)
        state, _ = step(state, batch)
        now, errors = traces.logical(state.params, cfg), logical_errors(state, cfg)
        assert float(scale) == float(state.guard["loss_scale"])
        for name, grad in wanted.items():
            found = start[name] - now[name]
            if name in errors:
                found, grad = found + errors[name], grad + before[name]
            size = np.abs(grad).max()
            # In float16, a loss scale moves gradients that would be too small to count.
            tolerance = 3e-3 if cfg.model.dtype == "float16" else 1e-5
            np.testing.assert_allclose(found, grad, atol=tolerance * size, err_msg=name)
        before = errors
        if i == 0:
            with Checkpointer(cfg) as checkpointer:
                checkpointer.save(state, 1, tokens_seen=0)
    again = checkpoint.restore(cfg, here)
    for batch in batches[1:]:
        again, _ = step(again, batch)
    assert_same_bits(jax.device_get(again), jax.device_get(state))


def gradients_of_replicas(params: Any, batch: Batch, cfg: Config, replicas: int) -> dict:
    """The plain model's gradients of each replica's rows, by name: [replicas, ...]."""
    gradients = _plain_gradients(cfg)
    count, found = np.sum(batch.labels != IGNORED), []
    for rows in np.split(np.arange(len(batch.labels)), replicas):
        labels = np.full_like(batch.labels, IGNORED)
        labels[rows] = batch.labels[rows]
        _, grads = gradients(params, batch.replace(labels=labels))
        share = np.sum(labels != IGNORED) / count
        found.append({name: np.asarray(g) * share for name, g in flat(grads).items()})
    return {name: np.stack([one[name] for one in found]) for name in found[0]}


@functools.cache
def _plain_gradients(cfg: Config):
    return jax.jit(lambda params, batch: traces.reference_gradients(params, batch, cfg))


@pytest.mark.parametrize(
    "mesh",
    [
        slow("replica=2,data=2,tensor=2"),
        slow("replica=2,data=2,num_microbatches=2,zero=2"),
        slow("replica=4,sequence=2"),
        slow("pipeline=2,replica=2,data=2,num_microbatches=2"),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_power_sgd_trains_as_the_plain_model_with_its_sums(mesh, optimizer, devices):
    cfg, here = on_mesh(mesh, "power_sgd", devices, **{"optimizer.name": optimizer})
    batches = [traces.random_batch(cfg, i) for i in range(STEPS)]
    found = traces.mesh_trace(cfg, here, batches, STEPS)

    specs, r = flat(specs_of(cfg)), cfg.parallel.replica
    rule = make_optimizer(cfg.optimizer, cfg.train.num_steps, specs_of(cfg))
    params = traces.initial_params(specs_of(cfg), cfg.train.seed)
    kept = initialize(feedback_of(cfg), cfg.train.seed)
    factors = {name: np.asarray(q) for name, q in flat(kept["factors"]).items()}
    errors, state = dict.fromkeys(factors, 0.0), rule.init(params)
    for batch in batches:
        grads = gradients_of_replicas(params, batch, cfg, r)
        for name, x in grads.items():
            grads[name] = x.sum(0)
            if name in factors:
                dims = dims_of(specs[name])
                grads[name], errors[name], factors[name] = plain.power_sgd(
                    x + errors[name], factors[name], dims.lead, dims.cut
                )
        tree = jax.tree.unflatten(
            jax.tree.structure(params), [np.float32(grads[name]) for name in sorted(grads)]
        )
        norm = optax.global_norm(tree)
        scale = np.float32(min(1.0, cfg.optimizer.clip_norm / (float(norm) + 1e-6)))
        tree = jax.tree.map(functools.partial(np.multiply, scale), tree)
        updates, state = rule.update(tree, state, params)
        params = optax.apply_updates(params, updates)
    errors = distances.update_errors(found.params, traces.to_host(params), found.init)
    assert distances.worst(errors)[0] < 1e-5
