"""Errors of compressed sums over replicas in checkpoints: of other replicas, meshes and methods."""

import jax
import numpy as np
import pytest

from jaxpar import config
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config import Config
from jaxpar.config.validate import resolve
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step import state
from tests.checkpoint.test_checkpoint import (
    VIRTUAL,
    assert_same_bits,
    logical,
    random_state,
    save,
    write_dataset,
)
from tests.slow import slow
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

UNEQUAL = {
    "parallel.pipeline": 2,
    "parallel.num_microbatches": 2,
    "parallel.layers_per_stage": (3, 1),
}

#: Axes of meshes by number of replicas.
AXES = "pipeline replica data".split()


@pytest.fixture
def setup(tmp_path, devices):
    """(method, replicas, other fields) -> (the resolved config, its mesh)."""
    data = write_dataset(tmp_path / "data")
    places = {"run.dir": str(tmp_path / "run"), "data.path": data}
    base = config.replace(Config(), **STATE, **places)

    def make(method: str, replicas: int, **values):
        fields = {"parallel.replica_reduction": method, "parallel.replica": replicas}
        cfg = config.replace(base, **fields | {"parallel.data": 1} | values)
        n = int(np.prod([getattr(cfg.parallel, axis) for axis in AXES]))
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


def errors_of(of: state.TrainState, cfg: Config) -> dict[str, np.ndarray]:
    """The errors in the order of the model's layers, without the dim of replicas: their sums."""
    specs = flat(state.feedback_of(cfg)["errors"])
    found = flat(logical(of, cfg).extra["feedback"]["errors"])
    return {name: a.sum(specs[name].axes.index("replica")) for name, a in found.items()}


def test_a_round_trip_keeps_every_bit(setup):
    cfg, mesh = setup("top_k", 2)
    saved = save(cfg, mesh, 3)
    assert set(saved.extra["feedback"]) == {"errors"}
    restored = restore(cfg, mesh)
    assert_same_bits(restored, saved)
    assert jax.tree.map(lambda a: a.sharding, restored) == state.state_shardings(cfg, mesh)


@pytest.mark.parametrize(
    ("replicas", "more"),
    [
        (3, {"train.global_batch_size": 6}),
        slow(2, {"parallel.data": 2}),
        slow(4, VIRTUAL),
        slow(4, UNEQUAL),
    ],
)
def test_other_replicas_share_the_same_sum(setup, capfd, replicas, more):
    batch = {name: v for name, v in more.items() if name.startswith("train.")}
    cfg, mesh = setup("int8", 2, **batch)
    wanted = errors_of(save(cfg, mesh, 5), cfg)
    second, other_mesh = setup("int8", replicas, **more)
    restored = restore(second, other_mesh)
    found = errors_of(restored, second)
    for name, of in wanted.items():
        np.testing.assert_allclose(found[name], of, rtol=1e-6, atol=1e-3, err_msg=name)
    shardings = jax.tree.map(lambda a: a.sharding, restored)
    assert shardings == state.state_shardings(second, other_mesh)
    text = f"errors of 2 replicas in the checkpoint of step 5 are shared out over {replicas}"
    assert (text in capfd.readouterr().out) == (replicas != 2)


def test_methods_share_errors_and_exact_sums_drop_them(setup, capfd):
    cfg, mesh = setup("top_k", 2)
    saved = save(cfg, mesh, 1)
    other, _ = setup("int8", 2)
    restored = restore(other, mesh)
    assert_same_bits(
        jax.device_get(restored.extra["feedback"]), jax.device_get(saved.extra["feedback"])
    )
    assert "start anew" not in capfd.readouterr().out
    exact, _ = setup("float32", 2)
    restored = restore(exact, mesh)
    assert "feedback" not in restored.extra
    assert_same_bits(jax.device_get(restored.params), jax.device_get(saved.params))
    assert (
        "the errors of compressed sums in the checkpoint of step 1 are dropped"
        in capfd.readouterr().out
    )


def test_a_run_that_had_none_starts_with_zero(setup, capfd):
    cfg, mesh = setup("bfloat16", 2)
    with Checkpointer(cfg) as checkpointer:
        checkpointer.save(random_state(cfg, mesh, 2), 2, tokens_seen=0)
    assert "feedback" not in random_state(cfg, mesh, 2).extra
    second, _ = setup("int8", 2)
    restored = restore(second, mesh)
    errors = jax.tree.leaves(restored.extra["feedback"]["errors"])
    assert len(errors) == 9 and not any(np.any(a) for a in errors)
    assert "errors of compressed sums start anew for 9 arrays" in capfd.readouterr().out
