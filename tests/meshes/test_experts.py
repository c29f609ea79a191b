"""Mixtures of experts: the same loss, gradients and steps on every mesh as the plain model's."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import Config, ConfigError, ModelConfig, replace
from jaxpar.config.command_line import load_config
from jaxpar.config.validate import check, resolve
from jaxpar.model import flops, moe
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.verification import distances, small_config, traces
from jaxpar.verification.meshes import parse_meshes
from tests import weights
from tests.slow import slow
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 1e-5

BASE = replace(TINY, **{"model.d_ff": 12, "model.num_experts": 4})

QUICK_MESHES = """
tensor=2
pipeline=2,num_microbatches=2,zero=1
expert=2,sequence=2,layer_loop=unroll
""".split()

SLOW_MESHES = """
data=2
data=2,num_microbatches=2,zero=2
data=2,tensor=2,layer_loop=unroll,row_groups=2
pipeline=2,sequence=2,tensor=2,num_microbatches=2
pipeline=2,num_microbatches=4,schedule=zero_bubble,zero=1,layer_loop=unroll
""".split()


@functools.cache
def reference_of(cfg: Config, steps: int):
    batches = [traces.random_batch(cfg, i) for i in range(max(steps, 1))]
    if not steps:
        return batches, weights.plain_gradients(cfg, batches[0])
    return batches, traces.reference_trace(cfg, batches, steps)


def compare(mesh_item: str, cfg: Config, devices, steps: int = 0) -> distances.Comparison:
    parallel = parse_meshes([mesh_item], cfg.parallel)[mesh_item]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    batches, wanted = reference_of(cfg, steps)
    mesh = make_mesh(parallel, devices[:n])
    if steps:
        found = traces.mesh_trace(on_mesh, mesh, batches, steps)
    else:
        found = weights.first_gradients(on_mesh, mesh, batches[0])
    return distances.compare(found, wanted, TOLERANCE)


@pytest.mark.parametrize("mesh", [*QUICK_MESHES, *map(slow, SLOW_MESHES)])
def test_gradients(mesh, devices):
    found = compare(mesh, BASE, devices)
    assert not found.mismatches()


@pytest.mark.slow
def test_gradients_without_normalization(devices):
    other = {"model.normalize_experts": False, "model.experts_per_token": 3, "model.num_layers": 1}
    found = compare("tensor=2", replace(BASE, **other), devices)
    assert not found.mismatches()


@pytest.mark.slow
def test_three_steps(devices):
    found = compare("pipeline=2,tensor=2,num_microbatches=2,zero=1", BASE, devices, 3)
    assert found.update is not None and not found.mismatches()


def test_a_token_takes_its_likeliest_experts():
    m = ModelConfig(num_experts=4, experts_per_token=2)
    chances = np.array([0.1, 0.5, 0.15, 0.25])
    router, h = jnp.log(jnp.asarray(chances))[None], jnp.ones((1, 1, 1))
    np.testing.assert_allclose(moe.route(h, router, m)[0, 0], [0, 2 / 3, 0, 1 / 3], rtol=1e-6)
    as_is = ModelConfig(num_experts=4, experts_per_token=2, normalize_experts=False)
    np.testing.assert_allclose(moe.route(h, router, as_is)[0, 0], [0, 0.5, 0, 0.25], rtol=1e-6)


def test_experts_not_taken_do_not_count_as_flops():
    mixtral = replace(
        load_config("llama3_8b"),
        **{"model.num_experts": 8, "model.vocab_size": 32000, "model.sliding_window": None},
    ).model
    assert flops.num_params(mixtral) == pytest.approx(46.7e9, rel=1e-3)  # Mixtral 8x7B's
    assert flops.num_matmul_params(mixtral) == pytest.approx(12.9e9 - 32000 * 4096, rel=5e-3)


def test_shrinking_keeps_the_experts():
    small = small_config.shrink(replace(BASE, **{"model.num_experts": 128}), [BASE.parallel])
    assert (small.model.num_experts, small.model.experts_per_token) == (8, 2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.num_experts": -1}, r"model\.num_experts = -1: must not be negative"),
        ({"model.experts_per_token": 5}, r"= 5: must be at most model\.num_experts = 4.*use --mo"),
        ({"model.experts_per_token": 0}, r"experts_per_token = 0: must be at least 1"),
        (
            {"model.experts_per_token": 1},
            r"= 1: leaves the router without a gradient.*normalize-experts F",
        ),
        (
            {"model.experts_per_token": 1, "model.normalize_experts": False}
            | {"model.post_norms": True},
            r"= 1: leaves the router without a gradient: the norm after.*post-norms False",
        ),
        ({"model.num_experts": 0, "model.experts_per_token": 3}, "= 3: needs experts"),
        ({"model.num_experts": 0, "model.normalize_experts": False}, "= False: needs experts"),
        ({"model.mlp_bias": True}, r"model\.mlp_bias = True: needs a dense feed-forward layer"),
        ({"model.matmul_dtype": "float8"}, r"matmul_dtype = 'float8': does not support experts"),
    ],
)
def test_what_cannot_be(values, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(BASE, **values))
