"""Layers whose backward is written out: the gradients of autodiff, and what holds it together."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.fsdp.prefetch import WeightStream, through_layers

LAYERS = 3


def block(x, w, context):
    return jnp.tanh(x @ w + context)


def gather(shard):
    return 2.0 * shard


def scatter(d_whole):
    return jnp.sin(d_whole)  # a mark to look for; no collective is needed here


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    shards = tuple(draw(4, 4) for _ in range(LAYERS))
    return shards, draw(2, 4), draw(4, 5), draw(2, 4)


def gradients(scatter, communicates, shards, x, beside, context):
    """Of a loss, for the shards, x, and weights used later."""
    blocks = (block,) * LAYERS
    stream = WeightStream(lambda w: w, gather, scatter, communicates, communicates)
    layers = functools.partial(through_layers, blocks, stream)

    def loss(shards, x, beside):
        y, beside = layers(shards, x, beside, context)
        return jnp.sum(jnp.tanh(y @ beside))

    return jax.grad(loss, (0, 1, 2))(shards, x, beside)


def plain(shards, x, beside, context):
    def loss(shards, x, beside):
        for shard in shards:
            x = block(x, gather(shard), context)
        return jnp.sum(jnp.tanh(x @ beside))

    return jax.grad(loss, (0, 1, 2))(shards, x, beside)


@pytest.mark.parametrize("communicates", [False, True])
def test_gradients_are_those_of_autodiff(communicates):
    doubled = lambda d_whole: 2.0 * d_whole  # noqa: E731, the transpose of `gather`
    found = gradients(doubled, communicates, *arguments())
    chex.assert_trees_all_close(found, plain(*arguments()), rtol=1e-5)


def users_of(jaxpr, var):
    return [eqn for eqn in jaxpr.eqns if any(v is var for v in eqn.invars)]


@pytest.mark.parametrize("communicates", [False, True])
def test_what_is_sent_is_there_before_the_layer_below_ends(communicates):
    """XLA may put off what nothing waits for: with sends, the next layer's gradient waits."""
    made = functools.partial(gradients, scatter, communicates)
    jaxpr = jax.make_jaxpr(made)(*arguments()).jaxpr
    sums = [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "sin"]  # top layer first
    assert len(sums) == LAYERS
    for above, below in zip(sums, [*sums[1:], None], strict=True):
        waits = [e for e in users_of(jaxpr, above) if e.primitive.name == "optimization_barrier"]
        assert len(waits) == (1 if communicates and below is not None else 0)
        for barrier in waits:
            (scattered,) = [e for e in jaxpr.eqns if below in e.outvars]
            assert scattered.invars[0] in barrier.outvars, "the layer below is let go by this one"
            assert len(barrier.invars) == 3, "its gradient, these, and what goes further down"


def test_a_forward_gather_waits_for_the_input_of_the_layer_before():
    """No longer, so that it may begin with that layer; no less, so that two are whole at once."""
    marked = lambda shard: jnp.exp(shard)  # noqa: E731
    stream = WeightStream(lambda w: w, marked, scatter, gathers=True, scatters=True)
    layers = functools.partial(through_layers, (block,) * LAYERS, stream)
    shards, x, beside, context = arguments()

    def forward(shards, x):
        return jax.vjp(lambda shards, x: layers(shards, x, beside, context), shards, x)[0]

    jaxpr = jax.make_jaxpr(forward)(shards, x).jaxpr
    gathers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "exp"]
    inputs = [
        jaxpr.invars[LAYERS],
        *(e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "tanh"),
    ]
    assert len(gathers) == LAYERS and gathers[0].invars[0] is jaxpr.invars[0]
    for gathered, waits_for in zip(gathers[1:], inputs, strict=False):
        (barrier,) = [e for e in jaxpr.eqns if gathered.invars[0] in e.outvars]
        assert barrier.primitive.name == "optimization_barrier"
        assert any(v is waits_for for v in barrier.invars)


def test_gathers_wait_for_the_layer_above():
    """Each but the last layer's, whose weights the backward needs at once, if sends or not."""
    found = {}
    for communicates in (False, True):
        jaxpr = jax.make_jaxpr(functools.partial(gradients, scatter, communicates))(
            *arguments()
        ).jaxpr
        found[communicates] = sum(e.primitive.name == "optimization_barrier" for e in jaxpr.eqns)
    # One for each gather of the backward; with sends one before and one after each layer as well,
    # and one for each gather of the forward but the first.
    assert found == {False: LAYERS, True: 4 * LAYERS - 1}
