"""What a step says about its experts: loads by layer, the fullest rank, further rounds."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import Config, replace
from jaxpar.config.validate import resolve
from jaxpar.model.parameters import param_specs
from jaxpar.model.plain import decoder
from jaxpar.sharding.batch import IGNORED
from jaxpar.sharding.mesh import axis_sizes, make_mesh
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_train_step
from tests import weights
from tests.meshes.test_experts import BASE as OF_TWO_LAYERS
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures("quick_compile")

#: Three layers, so that stages have unequal numbers of them.
BASE = replace(OF_TWO_LAYERS, **{"model.num_layers": 3})


@functools.cache
def rows_of_plain_model(cfg: Config) -> np.ndarray:
    """Tokens of each expert, [layers, E], of the plain model."""
    params = weights.values_of(tuple(weights.flat(param_specs(cfg.model)).items()), cfg.train.seed)
    loads = jax.jit(lambda params, batch: decoder.loads(params, batch, cfg))
    return np.asarray(loads(params, traces.random_batch(cfg)))


@functools.cache
def measured(mesh_item: str, cfg: Config) -> dict[str, np.ndarray]:
    """The metrics of a step on a mesh."""
    parallel = parse_meshes([mesh_item], cfg.parallel)[mesh_item]
    n = math.prod(axis_sizes(parallel))
    on_mesh = resolve(replace(cfg, parallel=parallel), n)
    mesh = make_mesh(parallel, jax.devices()[:n])
    batch = traces.shard_batch(traces.random_batch(cfg), on_mesh, mesh)
    step = make_train_step(on_mesh, mesh, requested=("expert_rows",))
    _, found = step(init_state(on_mesh, mesh), batch)
    return {k: np.asarray(v) for k, v in jax.device_get(found).items()}


TOKENS = replace(BASE, **{"parallel.expert_dispatch": "tokens"})

#: The buffer has 0.3 of equal shares.
IN_ROUNDS = replace(TOKENS, **{"parallel.expert_slack": 0.3})

SLOW_MESHES = """
expert=2
expert=2,pipeline=2,num_microbatches=2,zero=1
data=2
expert=4
expert=2,tensor=2
expert=2,sequence=2,layer_loop=unroll
expert=2,pipeline=2,num_microbatches=2,virtual_stages=2,zero=1
pipeline=2,num_microbatches=2
""".split()


FURTHER = ["expert=2", "expert=2,tensor=2", "expert=4,data=2"]


@pytest.mark.parametrize(
    ("mesh", "cfg"), [(FURTHER[1], IN_ROUNDS), *(slow(mesh, BASE) for mesh in SLOW_MESHES)]
)
def test_loads_are_those_of_the_plain_model(mesh, cfg):
    cfg = replace(cfg, **{"model.num_layers": 5}) if "virtual" in mesh else cfg
    rows, found = rows_of_plain_model(cfg), measured(mesh, cfg)
    np.testing.assert_array_equal(found["expert_rows"], rows)
    np.testing.assert_allclose(found["fullest_expert"], (4 * rows / rows.sum(1)[:, None]).max())
    assert found["dropped_rows"] == 0
    n = int(mesh.partition("expert=")[2][:1] or 1)
    if n == 1:
        assert not {"fullest_rank", "fullest_rank_mean", "further_rounds"} & found.keys()
        return
    of_ranks = rows.reshape(len(rows), n, -1).sum(2)
    wanted = (of_ranks / of_ranks.mean(1, keepdims=True)).max(1)
    np.testing.assert_allclose(found["fullest_rank"], wanted.max(), rtol=1e-6)
    np.testing.assert_allclose(found["fullest_rank_mean"], wanted.mean(), rtol=1e-6)


def test_norm_and_tokens_are_those_of_the_plain_model():
    """The norm counts every weight once, also those of experts, and is that before clipping."""
    found, batch = measured(FURTHER[1], IN_ROUNDS), traces.random_batch(IN_ROUNDS)
    gradients = weights.plain_gradients(IN_ROUNDS, batch).gradients.values()
    norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients))
    assert norm > 1.05 * IN_ROUNDS.optimizer.clip_norm > 0
    np.testing.assert_allclose(found["grad_norm"], norm, rtol=1e-5)
    assert found["num_tokens"] == (batch.labels != IGNORED).sum()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FURTHER)
def test_a_buffer_for_all_that_can_arrive_needs_one_round(mesh):
    large = replace(TOKENS, **{"parallel.expert_slack": 4.0})
    assert measured(mesh, large)["further_rounds"] == 0


@pytest.mark.parametrize("mesh", slow_but(FURTHER[1:2], FURTHER))
def test_further_rounds_are_counted(mesh):
    rows, found = rows_of_plain_model(IN_ROUNDS), measured(mesh, IN_ROUNDS)["further_rounds"]
    n, groups = int(mesh.partition("expert=")[2][:1]), 2 if "data" in mesh else 1
    if groups == 1:  # all tokens are on one expert axis
        padded = (-(-rows // 32) * 32).reshape(len(rows), n, -1).sum(2)
        per_device = rows[0].sum() / n
        buffer = -(-int(0.3 * per_device) // 32) * 32 + 32 * 4 // n
        assert found == (np.maximum(-(-padded // buffer), 1) - 1).sum() > 0
    else:
        assert found > 0
