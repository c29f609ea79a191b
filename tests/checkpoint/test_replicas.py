"""Checkpoints of DiLoCo's replicas: bit for bit, and with more replicas, fewer or none."""

import jax
import numpy as np
import pytest

from jaxpar import config
from jaxpar.checkpoint.loading import restore, restore_params
from jaxpar.checkpoint.saving import Checkpointer
from jaxpar.config.validate import resolve
from jaxpar.sharding.axes import AXES
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from tests.checkpoint.test_checkpoint import assert_same_bits, base, save
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

__all__ = ["base"]  # the fixture

BFLOAT16 = {"optimizer.first_moment_dtype": "bfloat16"}
EIGHT = {f"optimizer.{name}_moment_dtype": "8bit" for name in ("first", "second")}


def replicas(number: int, **fields) -> dict:
    """The fields of a run with so many replicas; 0 without DiLoCo."""
    rows = {"parallel.replica": max(number, 1), "parallel.data": 2, "train.global_batch_size": 24}
    return rows | ({"diloco.every": 4} if number else {}) | fields


@pytest.fixture
def setup(base, devices):
    """(fields of the config) -> (the resolved config, its mesh)."""

    def make(fields):
        cfg = config.replace(base, **fields)
        n = int(np.prod([max(getattr(cfg.parallel, axis), 1) for axis in AXES]))
        return resolve(cfg, n), make_mesh(cfg.parallel, devices[:n])

    return make


def test_the_same_replicas_come_back_bit_for_bit(setup):
    cfg, mesh = setup(replicas(2))
    saved = save(cfg, mesh, 3)
    restored = restore(cfg, mesh)
    assert_same_bits(restored, saved)
    assert jax.tree.map(lambda a: a.sharding, restored) == state.state_shardings(cfg, mesh)
    params = restore_params(cfg.run.dir, cfg, mesh)
    assert_same_bits(params, saved.params)  # readers of a run get the outer weights


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (replicas(2), replicas(3)),
        slow(replicas(4), replicas(2)),
        slow(replicas(2), replicas(0)),
        slow(replicas(2), replicas(0, **BFLOAT16)),
        slow(replicas(2), replicas(0, **{"optimizer.ema.decay": 0.9})),
        slow(replicas(0), replicas(2)),
        slow(replicas(0, **BFLOAT16), replicas(2)),
    ],
)
def test_other_replicas_start_from_the_outer_weights(setup, then, now, capsys):
    cfg, mesh = setup(then)
    saved = jax.device_get(save(cfg, mesh, 3))
    other, other_mesh = setup(now)
    found = restore(other, other_mesh)
    assert jax.tree.map(lambda a: a.sharding, found) == state.state_shardings(other, other_mesh)
    said = capsys.readouterr().out
    assert "diloco     " in said and "from the checkpoint of step 3, with " in said
    before, after = (c.parallel.replica * bool(c.diloco) for c in (cfg, other))

    def own(moment, to):
        """What each replica has of a former one's."""
        rows = moment if before else moment[None]
        rows = rows[np.arange(max(after, 1)) % max(before, 1)]
        return (rows if after else rows[0]).astype(to.dtype)

    assert_same_bits(jax.device_get(found.params), saved.params)
    kept = (saved.opt_state, saved.extra["guard"]), (found.opt_state, found.extra["guard"])
    assert_same_bits(jax.device_get(kept[1]), jax.tree.map(own, *kept))
    if not after:
        assert "diloco" not in found.extra
        return
    for r in range(after):
        of_replica = jax.tree.map(lambda a, r=r: np.asarray(a)[r], found.extra["diloco"]["weights"])
        assert_same_bits(of_replica, saved.params)
    none = jax.tree.map(np.zeros_like, saved.params)
    momentum = saved.extra["diloco"]["momentum"] if before else none
    assert_same_bits(jax.device_get(found.extra["diloco"]["momentum"]), momentum)


@pytest.mark.slow
def test_moments_in_8_bits_before_and_after(setup):
    wide = {"model.d_model": 64, "model.*.feed_forward.d_ff": 128, "optimizer.moment_block": 32}
    cfg, mesh = setup(replicas(0) | wide | EIGHT)
    save(cfg, mesh, 3)
    diloco, its_mesh = setup(replicas(2) | wide)
    began = restore(diloco, its_mesh)
    with Checkpointer(diloco) as saver:
        saver.save(began.replace(step=began.step + 1), 4, tokens_seen=0)
    back = restore(cfg, mesh)
    found, first = jax.device_get((back.opt_state, began.opt_state))
    assert jax.tree.structure(found) != jax.tree.structure(first)  # codes and scales
    plain = config.replace(cfg, **dict.fromkeys(EIGHT, "float32"))
    of_first = restore(plain, mesh).opt_state
    one = jax.tree.map(lambda a: a[0], first)
    assert_same_bits(jax.device_get(of_first), one)
