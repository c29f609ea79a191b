"""Initial weights: the same bits on every mesh and in years to come, and no device makes them all.

Compiled for real, each array for each mesh: what other tests take instead is in tests/weights.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.certification import distances, traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import QkNorm
from jaxpar.model.parameters import param_specs
from jaxpar.sharding.initial_values import init_options, initialize
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.sharding.params import flat
from jaxpar.step.state import _initial_values, init_state, state_shardings
from tests import weights
from tests.slow import slow
from tests.step.test_memory import BASE, SHARDED, STAGES, ready

CHANGES = {"model.layers.mixer.bias": True, "model.layers.mixer.qk_norm": QkNorm()}


def on_mesh(mesh_item: str, devices):
    """The state on a mesh such as "data=2,tensor=2", and its config."""
    parallel = parse_meshes([mesh_item], BASE.parallel)[mesh_item]
    cfg, _ = ready(devices, **{f"parallel.{k}": v for k, v in vars(parallel).items()}, **CHANGES)
    return cfg, init_state(cfg, make_mesh(cfg.parallel, devices[: math.prod(axis_sizes(parallel))]))


@pytest.fixture(scope="module")
def by_one_program(devices) -> traces.Arrays:
    """`initialize` on one device: the definition."""
    cfg, _ = ready(devices, **CHANGES)
    _initial_values.cache_clear()  # of generators compiled without optimizations
    make = functools.partial(initialize, param_specs(cfg.model))
    return traces.to_host(jax.jit(make)(cfg.train.seed))


@pytest.mark.parametrize(
    "mesh",
    [
        "data=2,sequence=2,tensor=2",
        "pipeline=2,virtual_stages=2,num_microbatches=2,zero=1",
        slow("data=1"),
        slow("pipeline=2,tensor=2,expert=2"),
    ],
)
def test_every_mesh_has_the_bits_of_one_program(mesh, devices, by_one_program):
    cfg, made = on_mesh(mesh, devices)
    assert not distances.differing_arrays(traces.logical(made.params, cfg), by_one_program)
    assert int(made.step) == 0 and not any(jnp.any(a) for a in jax.tree.leaves(made.opt_state))


def test_the_weights_of_tests_have_the_bits_of_one_program(devices, by_one_program):
    cfg, _ = ready(devices, **CHANGES)
    specs = tuple(flat(param_specs(cfg.model)).items())
    made = traces.to_host(weights.values_of(specs, cfg.train.seed))
    assert not distances.differing_arrays(made, by_one_program)


def test_a_device_makes_its_own_shard_and_no_more(devices):
    """Of each initial array: the program puts out a shard. Beside it, XLA keeps the generator's
    integers on a CPU, three of a shard's size; compiled for an H200, some KB."""
    sizes = {"model.d_model": 256, "model.layers.feed_forward.d_ff": 1024, "model.vocab_size": 4096}
    cfg, mesh = ready(devices, **sizes, **STAGES, **SHARDED)
    specs, to = flat(param_specs(cfg.model)), flat(state_shardings(cfg, mesh).params)
    key, options = jax.ShapeDtypeStruct((2,), jnp.uint32), init_options("cpu")
    for name, spec in specs.items():
        memory = _initial_values(spec, to[name], options).lower(key).compile().memory_analysis()
        shard = 4 * math.prod(to[name].shard_shape(spec.shape))
        assert memory.output_size_in_bytes == shard, name
        assert memory.temp_size_in_bytes < 3.1 * shard + 8192, (name, memory.temp_size_in_bytes)
        if spec.init == "normal":
            assert memory.temp_size_in_bytes + shard < 4 * math.prod(spec.shape), name


#: The first numbers of some initial arrays under seed 3, as float32 bits, of JAX 0.11.2 on a CPU.
PINNED = {
    "embed": [0xBC17D071, 0x3D075C49, 0xBC0425D7],
    "layers/wq": [0x3C8E345E, 0x3D00FF31, 0xBBB73D06],
    "layers/w_down": [0xBBF84283, 0xBBD71598, 0xBBB21017],
    "head": [0x3C8DC7F4, 0x3B9A652B, 0xB95DB051],
}


def test_initial_values_stay_as_they_were():
    """A run that is repeated years later starts from the same weights."""
    made = flat(jax.jit(lambda: initialize(param_specs(BASE.model), 3))())
    found = {name: np.asarray(made[name]).ravel()[:3].view(np.uint32).tolist() for name in PINNED}
    assert found == PINNED
