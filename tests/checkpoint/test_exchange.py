"""Outer gradients that DiLoCo was exchanging at a checkpoint, on the same mesh or another."""

import jax
import numpy as np
import pytest

from jaxpar import config
from jaxpar.checkpoint.loading import restore
from jaxpar.config.validate import resolve
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.mesh import make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step import state
from tests.checkpoint.test_checkpoint import assert_same_bits, base, save
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

__all__ = ["base"]  # the fixture

#: After step 3, fragment 1, which is due after step 2, has sent the first of its two parts.
FIELDS = {
    "parallel.replica": 2,
    "train.global_batch_size": 24,
    "diloco.every": 4,
    "diloco.fragments": 2,
    "diloco.overlap": 2,
}
STEP = 3

NEW_PARTS = "the exchange of fragment 1 ends at once: its parts are others now"


@pytest.fixture
def setup(base, devices):
    """(fields of the config) -> (the resolved config, its mesh)."""

    def make(**fields):
        cfg = config.replace(base, **(FIELDS | {"parallel.data": 2} | fields))
        n = int(np.prod([max(getattr(cfg.parallel, axis), 1) for axis in AXES]))
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


def fragment(arrays: dict, i: int, n: int) -> dict:
    """The arrays of a fragment, by name."""
    ends = {"embed": 0, "final_norm": n - 1, "head": n - 1}
    layers = {k: a[:, i::n] for k, a in arrays.items() if k not in ends}
    return layers | {k: a for k, a in arrays.items() if ends.get(k) == i}


def assert_close(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-3, err_msg=name)


def test_the_same_parts_come_back_bit_for_bit(setup, capsys):
    cfg, mesh = setup()
    saved = save(cfg, mesh, STEP)
    restored = restore(cfg, mesh)
    assert_same_bits(restored, saved)
    assert jax.tree.map(lambda a: a.sharding, restored) == state.state_shardings(cfg, mesh)
    assert "diloco     " not in capsys.readouterr().out


@pytest.mark.parametrize(
    "other", [{"parallel.tensor": 2, "parallel.data": 1}, slow({"parallel.data": 4})]
)
def test_with_other_parts_the_exchange_ends_at_once(setup, other, capsys):
    cfg, mesh = setup()
    saved = jax.device_get(save(cfg, mesh, STEP))
    found = jax.device_get(restore(*setup(**other)))
    said = capsys.readouterr().out
    assert NEW_PARTS in said
    assert_same_bits(found.extra["diloco"]["outgoing"], saved.extra["diloco"]["outgoing"])
    sent, arrived = flat(saved.extra["diloco"]["outgoing"]), flat(found.extra["diloco"]["arrived"])
    names = fragment(dict.fromkeys(flat(saved.params), np.zeros((1, 2))), 1, 2)
    mean = {k: np.mean(a, axis=0) for k, a in sent.items() if k in names}
    assert_close({k: arrived[k] for k in mean}, mean)
    others = arrived.keys() - mean.keys()  # of the other fragment
    assert others
    for name in others:
        np.testing.assert_array_equal(arrived[name], flat(saved.extra["diloco"]["arrived"])[name])


@pytest.mark.parametrize(
    ("then", "due"),
    [
        ({"diloco.overlap": 0}, 1),
        slow({"diloco.fragments": 1}, 1),
        slow({"train.num_steps": 4}, 1),
        slow({"diloco.every": 8}, 1),
    ],
)
def test_without_one_the_present_gradient_is_exchanged(setup, then, due, capsys):
    cfg, mesh = setup(**then)
    saved = jax.device_get(save(cfg, mesh, STEP))
    found = jax.device_get(restore(*setup()))
    assert f"fragment {due} is exchanged at once" in capsys.readouterr().out
    outer, own = flat(saved.params), flat(saved.extra["diloco"]["weights"])
    gradient = fragment({k: outer[k][None] - own[k] for k in outer}, due, 2)
    sent, arrived = flat(found.extra["diloco"]["outgoing"]), flat(found.extra["diloco"]["arrived"])
    assert_close({k: sent[k] for k in gradient}, gradient)
    mean = {k: np.mean(a, axis=0) for k, a in gradient.items()}
    assert_close({k: arrived[k] for k in mean}, mean)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_nothing_under_way_reads_none(setup, steps):
    """With an overlap of one step, fragment 1 has been applied after step 3."""
    cfg, mesh = setup()
    saved = save(cfg, mesh, STEP)
    found = restore(*setup(**{"diloco.overlap": steps}))
    kept = {k: saved.extra["diloco"][k] for k in ("weights", "momentum")}
    assert_same_bits({k: found.extra["diloco"][k] for k in kept}, kept)
    assert len(found.extra["diloco"]) == (4 if steps else 2)


@pytest.mark.slow
def test_other_replicas_have_nothing_to_exchange(setup):
    cfg, mesh = setup()
    saved = jax.device_get(save(cfg, mesh, STEP))
    found = jax.device_get(restore(*setup(**{"parallel.replica": 3})))
    assert_same_bits(found.params, saved.params)
    for name in ("outgoing", "arrived"):
        assert not any(np.any(a) for a in jax.tree.leaves(found.extra["diloco"][name])), name
