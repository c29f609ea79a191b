"""Copies of the state are compared on the devices, and a device that has drifted is named."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.runtime import exit_codes
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step import state
from jaxpar.step.replica_check import ReplicaCheck, require_equal
from tests.slow import slow_but
from tests.tiny import STATE

pytestmark = pytest.mark.usefixtures("quick_compile_of_module")

MESHES = {
    "replicas": {"parallel.replica": 3, "parallel.data": 2},
    "tensor": {"parallel.tensor": 2, "parallel.data": 4},
    "pipeline": {
        "parallel.pipeline": 2,
        "parallel.data": 4,
        "parallel.zero": 1,
        "parallel.num_microbatches": 2,
    },
}


def flipped(x: jax.Array, device: jax.Device, bit: int) -> jax.Array:
    """The array, with a bit of one device's copy flipped."""
    shards = []
    for shard in x.addressable_shards:
        values = np.array(shard.data)
        if shard.device == device:
            values.reshape(-1).view(np.uint32)[values.size // 2] ^= np.uint32(1 << bit)
        shards.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@pytest.mark.parametrize("mesh_name", slow_but(["replicas"], MESHES))
def test_a_device_that_has_drifted_is_named(devices, mesh_name):
    cfg = replace(Config(), **STATE, **MESHES[mesh_name], **{"train.global_batch_size": 24})
    p = cfg.parallel
    n = p.pipeline * p.replica * p.data * p.tensor
    cfg = resolve(cfg, n)
    mesh = make_mesh(cfg.parallel, devices[:n])
    now = state.init_state(cfg, mesh)
    check = ReplicaCheck(cfg, mesh)
    assert check(now) == []
    require_equal(7, check(now))
    for device, bit in ((mesh.devices.flat[n - 1], 0), (mesh.devices.flat[1], 31)):
        norm = now.params["final_norm"]  # a copy on every device
        bad = dataclasses.replace(
            now, params=now.params | {"final_norm": flipped(norm, device, bit)}
        )
        (drift,) = check(bad)
        assert (drift.name, drift.devices) == ("params/final_norm", (device,))
        with pytest.raises(
            exit_codes.BadNumerics, match=rf"step 7: .*params/final_norm: {device} of"
        ):
            require_equal(7, [drift])


@pytest.mark.slow
def test_shards_are_compared_with_their_own_copies(devices):
    """And of two copies that differ, neither is accused."""
    cfg = replace(Config(), **STATE, **{"parallel.replica": 2, "parallel.data": 2})
    cfg = resolve(cfg, 4)
    mesh = make_mesh(cfg.parallel, devices[:4])
    now = state.init_state(cfg, mesh)
    moment = now.opt_state[0].nu["layers"]["wq"]
    layers = now.opt_state[0].nu["layers"] | {"wq": flipped(moment, devices[3], 5)}
    nu = now.opt_state[0].nu | {"layers": layers}
    opt_state = (now.opt_state[0]._replace(nu=nu), *now.opt_state[1:])
    (drift,) = ReplicaCheck(cfg, mesh)(dataclasses.replace(now, opt_state=opt_state))
    assert drift.name == "opt_state/0/nu/layers/wq"
    assert drift.devices == (devices[1], devices[3])  # data = 1 on both replicas
    assert "with no majority" in str(drift)


@pytest.mark.slow
def test_with_offloading_the_parameters_are_compared(devices):
    cfg = replace(Config(), **STATE, **{"parallel.data": 4, "optimizer.offload": True})
    cfg = resolve(cfg, 4)
    mesh = make_mesh(cfg.parallel, devices[:4])
    now = state.init_state(cfg, mesh)
    assert ReplicaCheck(cfg, mesh)(now) == []
