"""The steps on a mesh: those of a run, from batches in text order."""

import jax
import numpy as np
import pytest

from jaxpar import functional
from jaxpar.certification import traces
from jaxpar.certification.meshes import parse_meshes
from jaxpar.config import replace
from jaxpar.sharding.mesh import make_mesh
from tests.slow import slow
from tests.tiny import TINY


@pytest.mark.parametrize(
    "mesh",
    ["sequence=2,tensor=2", slow("pipeline=2,data=2,num_microbatches=2"), slow("data=4,zero=1")],
)
def test_steps_are_those_of_the_plain_loss(mesh, devices):
    """The tokens of a batch change places on a sequence axis, which the step does."""
    config = replace(TINY, parallel=parse_meshes([mesh], TINY.parallel)[mesh])
    mesh = make_mesh(config.parallel, devices[:4])
    state, batch = functional.init_state(config, mesh), traces.random_batch(config)
    params = functional.init(config.model, jax.random.key(config.train.seed))
    wanted = float(functional.loss(params, batch, config.model, functional.loss_of(config)))
    evaluated = functional.make_eval_step(config, mesh)(state.params, batch)
    assert float(evaluated["loss"]) == pytest.approx(wanted, rel=1e-5)
    assert int(evaluated["num_tokens"]) == np.sum(batch.labels >= 0)
    step = functional.make_train_step(config, mesh)
    state, metrics = step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)
    assert metrics.keys() >= {"loss", "grad_norm", "num_tokens"}
    state, later = step(state, batch)
    assert int(state.step) == 2 and float(later["loss"]) < wanted


@pytest.mark.slow
def test_products_are_as_precise_as_the_config_says(devices):
    """Also where JAX's own setting differs; without one, that setting stays."""
    batch = traces.random_batch(TINY)
    mesh = make_mesh(replace(TINY, **{"parallel.data": 1}).parallel, devices[:1])

    def text(precision: str) -> str:
        config = replace(TINY, **{"compute.matmul_precision": precision})
        state = functional.init_state(config, mesh)
        step = functional.make_train_step(config, mesh)
        with jax.default_matmul_precision("bfloat16"):
            jaxpr = jax.make_jaxpr(lambda s: step(s, batch))(state)
        return str(jaxpr)

    assert "Precision.HIGHEST" in text("float32") and "Precision.HIGHEST" not in text("default")
