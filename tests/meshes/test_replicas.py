"""Training with compressed sums over replicas: a step's sum and errors are the gradients.

`tests/parallel/test_replicas.py` compares the sums alone with those of whole arrays, in less time.
"""

import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.certification import small_config, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import feedback_of, init_state, to_logical
from jaxpar.step.train_step import make_gradient_step, make_train_step
from tests.checkpoint.test_checkpoint import assert_same_bits, write_dataset
from tests.tiny import EXPERTS, TINY

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


def on_mesh(mesh: str, method: str, devices, **fields: Any) -> tuple[Config, jax.sharding.Mesh]:
    (parallel,) = parse_meshes([mesh], TINY.parallel).values()
    n = math.prod(axis_sizes(parallel))
    cfg = small_config.steady(replace(TINY, parallel=parallel))
    own = {"parallel.replica_reduction": method, "parallel.replica_top_k": 0.2}
    cfg = resolve(replace(cfg, **own | fields), n)
    return cfg, make_mesh(cfg.parallel, devices[:n])


def logical_errors(state: Any, cfg: Config) -> dict[str, np.ndarray]:
    """Sums of errors over replicas, by parameter."""
    found = flat(jax.device_get(to_logical(state, cfg)).extra["feedback"]["errors"])
    specs = flat(feedback_of(cfg)["errors"])
    return {name: a.sum(specs[name].axes.index("replica")) for name, a in found.items()}


@pytest.mark.slow  # quicker: parallel/test_replicas.py
@pytest.mark.parametrize(
    ("mesh", "method", "more"),
    [
        ("replica=2,data=2,zero=2", "int8", {}),
        ("replica=2,data=2,num_microbatches=2,zero=2", "int8", {}),
        ("replica=2,data=2,tensor=2", "top_k", {"compute.dtype": "float16"}),
        ("replica=2,data=2,expert=2", "int8", {"model.layers.feed_forward": EXPERTS}),
        ("replica=4,sequence=2,num_microbatches=2,zero=1", "top_k", {}),
        ("pipeline=2,replica=2,num_microbatches=2,layer_loop=unroll", "top_k", {}),
        ("pipeline=2,replica=2,num_microbatches=4,virtual_stages=2,zero=1", "int8", {}),
        ("replica=2,data=2", "int8", {"lora.rank": 3}),
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
    batches = [traces.shard_batch(traces.random_batch(cfg, i), cfg, here) for i in range(STEPS)]
    state = init_state(cfg, here)
    before = {name: 0.0 for name in logical_errors(state, cfg)}
    for i, batch in enumerate(batches):
        scale = state.extra["guard"]["loss_scale"]
        start = traces.logical(state.params, cfg)
        wanted = traces.logical(gradients(state.params, batch)[1], cfg)
        state, _ = step(state, batch)
        now, errors = traces.logical(state.params, cfg), logical_errors(state, cfg)
        assert float(scale) == float(state.extra["guard"]["loss_scale"])
        for name, grad in wanted.items():
            found = start[name] - now[name]
            if name in errors:
                found, grad = found + errors[name], grad + before[name]
            size = np.abs(grad).max()
            # In float16, a loss scale moves gradients that would be too small to count.
            tolerance = 3e-3 if cfg.compute.dtype == "float16" else 1e-5
            np.testing.assert_allclose(found, grad, atol=tolerance * size, err_msg=name)
        before = errors
        if i == 0:
            with Checkpointer(cfg) as checkpointer:
                checkpointer.save(state, 1, tokens_seen=0)
    again = restore(cfg, here)
    for batch in batches[1:]:
        again, _ = step(again, batch)
    assert_same_bits(jax.device_get(again), jax.device_get(state))
