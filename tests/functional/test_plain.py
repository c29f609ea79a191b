"""The plain functions: `jax.grad`, `vmap`, `jvp` and `jit` take them as they are, and a gradient of
a run's loss is the run's."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jaxpar import functional
from jaxpar.certification import traces
from jaxpar.checkpoint.loading import restore
from jaxpar.checkpoint.saved import saved_config
from jaxpar.config import ConfigError, replace
from jaxpar.config.validate import resolve
from jaxpar.functional.plain import Params
from jaxpar.model.parameters import specs_of
from jaxpar.objectives.losses import Scores
from jaxpar.runtime import exit_codes
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.train_step import make_gradient_step
from tests.tiny import EXPERTS, TINY

MODEL = TINY.model
KEY = jax.random.key(0)
TOKENS = np.zeros((2, 4), np.int32)


@pytest.fixture(scope="module")
def params() -> Params:
    return functional.init(MODEL, KEY)


@pytest.fixture(scope="module")
def batch():
    return traces.random_batch(TINY)


def test_initial_values_are_those_of_a_run_with_this_seed(params):
    of_run = traces.initial_params(specs_of(TINY), 0)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), params, of_run))


def test_seeds_are_mapped():
    keys = jax.random.split(KEY, 3)
    found = jax.jit(jax.vmap(lambda key: functional.init(MODEL, key)))(keys)
    wanted = functional.init(MODEL, keys[1])
    np.testing.assert_allclose(found["embed"][1], wanted["embed"], rtol=1e-6)
    assert found["layers"]["wq"].shape == (3, *wanted["layers"]["wq"].shape)


def test_a_gradient_is_compiled_once(params, batch):
    grad = jax.jit(jax.grad(functional.loss))
    of_one = grad(params, batch, MODEL, functional.NextToken())
    again = dataclasses.replace(MODEL)  # equal, but another object
    grad(params, batch, again, functional.NextToken(z_loss=0.0))
    assert grad._cache_size() == 1
    assert jax.tree.structure(of_one) == jax.tree.structure(params)


def test_a_derivative_in_a_direction_is_the_slope(params, batch):
    loss = jax.jit(lambda p: functional.loss(p, batch, MODEL))
    grad, step = jax.grad(loss)(params), 1e-3
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grad)))
    direction = jax.tree.map(lambda g: g / norm, grad)
    _, slope = jax.jvp(loss, (params,), (direction,))
    ahead, behind = (
        loss(jax.tree.map(lambda p, d, by=by: p + by * d, params, direction))
        for by in (step, -step)
    )
    assert float(slope) == pytest.approx(float(norm), rel=1e-4)
    assert float(slope) == pytest.approx(float((ahead - behind) / (2 * step)), rel=1e-2)


def test_the_loss_is_that_of_the_logits(params, batch):
    logits = functional.apply(
        params, batch.tokens, MODEL, positions=batch.positions, segment_ids=batch.segment_ids
    )
    scores = jax.nn.log_softmax(logits)
    labeled = batch.labels >= 0
    at = np.take_along_axis(np.asarray(scores), np.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    wanted = -at[labeled].mean()
    assert float(functional.loss(params, batch, MODEL)) == pytest.approx(wanted, rel=1e-5)


def test_what_a_batch_leaves_out_follows_from_its_tokens(params):
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6) % MODEL.vocab_size
    labels = np.concatenate([tokens[:, 1:], np.full((2, 1), -1, np.int32)], axis=1)
    place = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    given = {"tokens": tokens, "labels": labels, "positions": place, "segment_ids": place * 0 + 1}
    wanted = float(functional.loss(params, given, MODEL))
    assert float(functional.loss(params, {"tokens": tokens}, MODEL)) == wanted
    documents = np.array([[1, 1, 1, 2, 2, 2]] * 2, np.int32)
    cut = labels.copy()
    cut[:, 2] = -1
    both = [{"tokens": tokens, "segment_ids": documents} | more for more in ({}, {"labels": cut})]
    found = [float(functional.loss(params, one, MODEL)) for one in both]
    assert found[0] == found[1] != wanted


class Focal(functional.Loss):
    """A user's loss, with weights by token."""

    gamma: float = 2.0

    def __call__(self, scores, batch):
        nll = scores.logsumexp() - scores.label()
        return (1 - jnp.exp(-nll)) ** self.gamma * nll, 1.0 + batch.positions


def test_a_loss_is_a_value_of_the_users(params, batch):
    found = jax.jit(functional.loss)(params, batch, MODEL, Focal(gamma=2.0))
    logits = functional.apply(
        params, batch.tokens, MODEL, positions=batch.positions, segment_ids=batch.segment_ids
    )
    labeled = batch.labels >= 0
    scores = np.asarray(jax.nn.log_softmax(logits))
    nll = -np.take_along_axis(scores, np.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    weight = np.where(labeled, 1.0 + batch.positions, 0.0)
    wanted = np.sum((1 - np.exp(-nll)) ** 2 * nll * weight) / np.sum(weight)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


def test_scores_are_of_the_logits():
    logits = jax.random.normal(KEY, (2, 3, 5))
    scores = Scores(logits, jnp.array([[0, 1, 2], [3, 4, -1]]))
    p = jax.nn.softmax(logits)
    np.testing.assert_allclose(scores.entropy(), -jnp.sum(p * jnp.log(p), -1), rtol=1e-5)
    np.testing.assert_allclose(scores.logsumexp(), jnp.log(jnp.sum(jnp.exp(logits), -1)), rtol=1e-5)
    np.testing.assert_allclose(scores.mean(), jnp.mean(logits, -1), rtol=1e-6)
    assert scores.label()[1, 1] == logits[1, 1, 4] and scores.label()[1, 2] == logits[1, 2, 0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model.layers.feed_forward.d_ff": 32}, r"layers/w_\w+ = .*|has the shape"),
        ({"model.layers.feed_forward": EXPERTS}, "is not among the parameters"),
        ({"model.tie_embeddings": True}, "head.*is no parameter of this model"),
    ],
    ids=str,
)
def test_parameters_of_another_model_are_refused(changed, said, params, batch):
    with pytest.raises(ConfigError, match=said):
        functional.loss(params, batch, replace(TINY, **changed).model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"labels": np.zeros((2, 4), np.int32)}, "has no tokens"),
        ({"tokens": np.zeros(4, np.int32)}, r"tokens\[None\]"),
        ({"tokens": np.zeros((2, 4), np.float32)}, "must be integers"),
        (
            {"tokens": np.zeros((2, 4), np.int32), "labels": np.zeros((2, 5), np.int32)},
            r"labels.*5",
        ),
        ({"tokens": np.zeros((2, 4), np.int32), "mask": 1}, "mask.*is no array of a batch"),
    ],
    ids=str,
)
def test_a_batch_of_another_shape_is_refused(given, said, params):
    with pytest.raises(ConfigError, match=said):
        functional.loss(params, given, MODEL)


def test_a_config_is_no_model(params, batch):
    for call in (
        lambda: functional.init(TINY, KEY),
        lambda: functional.apply(params, batch.tokens, TINY),
        lambda: functional.loss(params, batch, TINY),
    ):
        with pytest.raises(ConfigError, match=r"model = 'Config'.*Fix: use config.model"):
            call()


def test_a_loss_of_pairs_is_refused():
    with pytest.raises(ConfigError, match=r"dpo.beta.*more than a batch of tokens"):
        functional.loss_of(replace(TINY, **{"dpo.beta": 0.1}))


@pytest.fixture(scope="module")
def trained(train_on, write_config, tmp_path_factory, devices):
    """A run on two stages: its folder, a batch, and the gradient that its mesh computes."""
    folder = tmp_path_factory.mktemp("trained")
    axes = ("--parallel.pipeline", "2", "--train.num-steps", "3")
    steps = ("--parallel.num-microbatches", "2", "--evaluation.every", "0")
    assert train_on(2, write_config(folder), *axes, *steps) == exit_codes.EXIT_OK
    cfg = resolve(saved_config(folder / "run"), 2)
    mesh = make_mesh(cfg.parallel, devices[:2])
    state, batch = restore(cfg, mesh), traces.random_batch(cfg)
    step = make_gradient_step(cfg, mesh)
    _, gradients = step(state.params, traces.shard_batch(batch, cfg, mesh))
    return folder / "run", batch, traces.logical(gradients, cfg)


@pytest.mark.slow
def test_the_gradient_of_a_runs_loss_is_the_runs(trained):
    folder, batch, of_run = trained
    params, config = functional.load(folder)
    grad = jax.jit(jax.grad(functional.loss))
    found = grad(params, batch, config.model, functional.loss_of(config))
    distances = {name: np.abs(a - of_run[name]).max() for name, a in traces.to_host(found).items()}
    largest = {name: np.abs(a).max() for name, a in of_run.items()}
    assert distances.keys() == largest.keys()
    assert not {n: (d, largest[n]) for n, d in distances.items() if d > 1e-5 * largest[n]}


def test_orbax_alone_reads_the_same(trained):
    """As docs/python_api.md says."""
    params, _ = functional.load(trained[0])
    folder = trained[0] / "checkpoints" / "3"
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.checkpointables_metadata(folder).metadata["state"]
    on_device = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here)  # noqa: E731
    alone = ocp.load_checkpointables(folder, {"state": jax.tree.map(on_device, saved)})
    chex.assert_trees_all_equal(alone["state"]["params"], params)
