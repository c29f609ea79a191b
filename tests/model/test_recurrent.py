"""Recurrences in chunks, and token by token: the same outputs and gradients."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.config import ParallelConfig
from jaxpar.kernels.recurrence import api
from jaxpar.kernels.recurrence.triton import api as triton
from jaxpar.model.plain import recurrent as reference
from jaxpar.model.recurrent.convolution import causal_convolution
from jaxpar.model.recurrent.delta_rule import delta_rule, delta_step
from jaxpar.model.recurrent.mamba import state_space
from jaxpar.parallel.collectives import varying
from jaxpar.sharding.axes import SEQUENCE
from jaxpar.sharding.mesh import make_mesh
from tests.slow import slow

T = 30


def on_shards(fn, devices, n: int = 1, check_vma: bool = True):
    """Run a function of [B, T, ...] arrays, one of which it returns, on n shards of a sequence."""
    mesh = make_mesh(ParallelConfig(data=1, sequence=n), devices[:n])
    spec = PartitionSpec(None, SEQUENCE)

    def local(*arrays):
        return jax.lax.psum(
            fn(*varying(arrays)), tuple(a for a in mesh.axis_names if a != SEQUENCE)
        )

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


def inputs(decay: float = 1.0, B: int = 2, H: int = 2, K: int = 3, V: int = 5):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    k = normal(B, T, H, K)
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -decay * jax.nn.softplus(normal(B, T, H))
    begins = rng.random((B, T)) < 0.15
    begins[:, 0] = True
    rate = jax.nn.sigmoid(normal(B, T, H))
    return normal(B, T, H, K), k, normal(B, T, H, V), log_decay, rate, jnp.asarray(begins)


def in_chunks(size, *arrays):
    return delta_rule(*arrays, size)[0]


def by_token(q, k, v, log_decay, rate, begins):
    return reference.delta_rule(q, k, v, jnp.exp(log_decay), rate, begins)


def with_gradients(fn, arrays):
    """Outputs, and the gradients of a weighted sum of them."""

    def total(*arrays):
        out = fn(*arrays, begins)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    *arrays, begins = arrays
    (_, out), grads = jax.jit(jax.value_and_grad(total, range(len(arrays)), has_aux=True))(*arrays)
    return out, *grads


@functools.cache
def wanted(decay: float):
    return with_gradients(by_token, inputs(decay))


def state_space_in_chunks(size, q, k, v, log_decay, begins):
    """With half as many keys and queries as values, as if two heads shared them."""
    return state_space(q[:, :, :1], k[:, :, :1], v, log_decay, begins, size)[0]


def state_space_by_token(q, k, v, log_decay, begins):
    q, k = (jnp.repeat(a[:, :, :1], 2, axis=2) for a in (q, k))
    return reference.state_space(q, k, v, jnp.exp(log_decay), begins)


@pytest.mark.parametrize(
    ("size", "decay", "shards"),
    [(7, 1.0, 1), slow(64, 30.0, 1), (4, 0.1, 2), slow(1, 1.0, 1), slow(3, 30.0, 5)],
)
def test_state_space_in_chunks(size, decay, shards, devices):
    fn = on_shards(functools.partial(state_space_in_chunks, size), devices, shards)
    *arrays, _, begins = inputs(decay)
    found, plain = (with_gradients(f, (*arrays, begins)) for f in (fn, state_space_by_token))
    for ours, theirs in zip(found, plain, strict=True):
        assert np.all(np.isfinite(ours))
        assert np.max(np.abs(ours - theirs)) <= 1e-5 * np.max(np.abs(theirs))


@pytest.mark.parametrize(
    ("size", "decay", "shards"),
    [
        (7, 1.0, 1),  # does not divide the sequence
        (64, 30.0, 1),  # one chunk, in which the state is soon below the smallest float
        (4, 0.1, 2),
        slow(1, 1.0, 1),
        slow(30, 1e-4, 1),
        slow(5, 1.0, 3),
        slow(3, 30.0, 5),
    ],
)
def test_delta_rule_in_chunks(size, decay, shards, devices):
    fn = on_shards(functools.partial(in_chunks, size), devices, shards)
    for ours, plain in zip(with_gradients(fn, inputs(decay)), wanted(decay), strict=True):
        assert np.all(np.isfinite(ours))
        assert np.max(np.abs(ours - plain)) <= 1e-5 * np.max(np.abs(plain))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["delta_rule", "state_space"])
def test_kernels_on_shards_of_a_sequence(rule, devices, monkeypatch):
    """The kernels, interpreted, with the state of the shard before."""
    monkeypatch.setattr(api, "choose", lambda *_: "triton")
    run = functools.partial(getattr(triton, rule), interpret=True)
    monkeypatch.setitem(api.BACKENDS, "triton", types.SimpleNamespace(**{rule: run}))
    *arrays, rate, begins = inputs(B=1, K=16, V=16)
    if rule == "delta_rule":
        fn, plain = functools.partial(in_chunks, 16), by_token
        arrays += [rate]
    else:
        fn, plain = functools.partial(state_space_in_chunks, 16), state_space_by_token
    # Pallas' interpreter does not know axes over which values vary.
    found = with_gradients(on_shards(fn, devices, 2, check_vma=False), (*arrays, begins))
    for ours, theirs in zip(found, with_gradients(plain, (*arrays, begins)), strict=True):
        assert np.max(np.abs(ours - theirs)) <= 1e-5 * np.max(np.abs(theirs))


def test_delta_rule_token_by_token_goes_on_from_a_state(devices):
    """As in generation, after a prompt of one document."""
    arrays = [a[:, :12] for a in inputs()[:5]]
    begins = jnp.zeros((2, 12), bool).at[:, 0].set(True)
    mesh = make_mesh(ParallelConfig(data=1), devices[:1])
    prompt = lambda *a: delta_rule(*a, begins[:, :9], 4)[1]  # noqa: E731
    state = jax.jit(
        jax.shard_map(
            prompt,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )(*[a[:, :9] for a in arrays])
    plain, step = jax.jit(by_token)(*arrays, begins), jax.jit(delta_step)
    for t in range(9, 12):
        out, state = step(*[a[:, t] for a in arrays], state)
        np.testing.assert_allclose(out, plain[:, t], atol=2e-6)


@pytest.mark.parametrize("shards", [1, slow(3)])
def test_convolution(shards, devices):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, T, 6)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    begins = inputs()[-1]
    place = jnp.broadcast_to(jnp.arange(T), begins.shape)
    positions = place - jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    found = on_shards(lambda x, p: causal_convolution(x, kernel, p), devices, shards)(x, positions)
    np.testing.assert_allclose(found, reference.convolve(x, kernel, begins), atol=1e-6)
