"""Cross entropy over a split vocabulary, against `jax.nn.log_softmax` of whole logits."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.certification import traces
from jaxpar.config import ParallelConfig, replace
from jaxpar.config.validate import resolve
from jaxpar.model import loss
from jaxpar.parallel.collectives import varying
from jaxpar.sharding.axes import TOKEN_AXES, VOCAB_AXES
from jaxpar.sharding.batch import IGNORED
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state
from jaxpar.step.train_step import make_gradient_step
from tests.slow import slow, slow_but
from tests.tiny import TINY

N, D, V = 24, 8, 16
"""Tokens, width, vocabulary."""

MESHES = {
    "whole": {},
    "tensor": {"tensor": 4},
    "pipeline": {"pipeline": 4},
    "tensor and pipeline": {"tensor": 2, "pipeline": 2},
    "tensor and tokens": {"tensor": 2, "data": 2, "sequence": 2},
}


def mesh_of(devices, sizes: dict):
    parallel = ParallelConfig(**{"data": 1} | sizes)
    return make_mesh(parallel, devices[: np.prod([*sizes.values(), 1], dtype=int)])


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    h, head = rng.normal(size=(N, D)), rng.normal(size=(D, V))
    labels = rng.integers(0, V, N).astype(np.int32)
    labels[[0, 7, N - 1]] = IGNORED
    return jnp.asarray(h, dtype), jnp.asarray(head, dtype), labels


def on_mesh(mesh, z_loss: float, h, head, labels, cotangent=1.0, dtype=jnp.float32, chunks=0):
    """((loss + z-loss, loss), gradient of h, gradient of head), all global."""

    def local(h, head, labels):
        options = dict(labels_N=labels, z_loss=z_loss, logits_dtype=dtype, chunks=chunks)
        run = functools.partial(loss.cross_entropy, **options)
        sums, vjp = jax.vjp(run, varying(h), varying(head))
        # A gradient of the second sum would add to the first's, if there were one.
        d_h, d_head = vjp((jnp.full_like(sums[0], cotangent), jnp.full_like(sums[1], 100.0)))
        d_h = lax.psum(d_h.astype(jnp.float32), VOCAB_AXES)
        return lax.psum(sums, TOKEN_AXES), d_h, lax.psum(d_head, TOKEN_AXES)

    tokens, columns = PartitionSpec(TOKEN_AXES), PartitionSpec(None, VOCAB_AXES)
    specs = dict(in_specs=(tokens, columns, tokens), out_specs=(PartitionSpec(), tokens, columns))
    return jax.jit(jax.shard_map(local, mesh=mesh, **specs))(h, head, labels)


def plain(z_loss: float, h, head, labels, cotangent=1.0, dtype=jnp.float32):
    """The same of whole logits, by autodiff."""

    def sums(h, head):
        logits = jnp.dot(h, head, preferred_element_type=dtype).astype(jnp.float32)
        weight = labels != IGNORED
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(logits), np.maximum(labels, 0)[:, None], axis=1
        )[:, 0]
        nll = -jnp.sum(jnp.where(weight, chosen, 0))
        z = jnp.sum(jnp.where(weight, jax.nn.logsumexp(logits, axis=-1) ** 2, 0))
        return nll + z_loss * z, nll

    total, vjp, nll = jax.vjp(sums, h, head, has_aux=True)
    return (total, nll), *vjp(jnp.float32(cotangent))


def assert_close(found, wanted, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def chunks_of(monkeypatch, tokens: int, vocab_shard: int) -> None:
    """Let a chunk hold so many tokens."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", tokens * vocab_shard * 4)
    assert loss.num_chunks(N, vocab_shard) == -(-N // tokens)


@pytest.mark.parametrize(
    ("name", "z_loss"),
    slow_but(
        [("whole", 0.0), ("tensor and pipeline", 0.1)],
        itertools.product(MESHES, (0.0, 0.1)),
    ),
)
def test_value_and_gradients(name, z_loss, devices):
    arrays = inputs()
    found = on_mesh(mesh_of(devices, MESHES[name]), z_loss, *arrays)
    assert_close(found, plain(z_loss, *arrays))


@pytest.mark.parametrize(
    ("name", "tokens"),
    slow_but(
        [("whole", 5), ("tensor and pipeline", 1)],
        itertools.product(["whole", "tensor and pipeline"], [1, 5, 6, 12]),
    ),
)
def test_chunks_add_up(name, tokens, devices, monkeypatch):
    arrays = inputs()
    chunks_of(monkeypatch, tokens, V if name == "whole" else V // 4)
    found = on_mesh(mesh_of(devices, MESHES[name]), 0.1, *arrays, cotangent=0.25)
    assert_close(found, plain(0.1, *arrays, cotangent=0.25))


@pytest.mark.parametrize(
    ("name", "chunks"),
    slow_but(
        [("whole", 100), ("tensor and pipeline", 5)],
        itertools.product(["whole", "tensor and pipeline"], [1, 5, 24, 100]),
    ),
)
def test_any_number_of_chunks_that_is_asked_for(name, chunks, devices, monkeypatch):
    arrays = inputs()
    chunks_of(monkeypatch, 6, V if name == "whole" else V // 4)
    found = on_mesh(mesh_of(devices, MESHES[name]), 0.1, *arrays, cotangent=0.25, chunks=chunks)
    assert_close(found, plain(0.1, *arrays, cotangent=0.25))


@pytest.mark.parametrize(("chunks", "tokens"), [slow(0, 256), slow(1, 256), (4, 64)])
def test_the_config_says_in_how_many(chunks, tokens, devices):
    cfg = resolve(replace(TINY, **{"parallel.data": 1, "parallel.loss_chunks": chunks}), 1)
    step = make_gradient_step(cfg, make_mesh(cfg.parallel, devices[:1]))
    program = str(jax.make_jaxpr(step)(abstract_state(cfg).params, traces.random_batch(cfg)))
    rows = {int(n) for n in re.findall(r"f32\[(\d+),48\]", program)}
    assert rows == {16, tokens}, "of the head, and of logits"


def test_large_logits_do_not_overflow(devices):
    h, head, labels = inputs()
    arrays = h * 50, head, labels
    found = on_mesh(mesh_of(devices, MESHES["tensor"]), 0.0, *arrays)
    assert np.isfinite(found[0][0])
    assert_close(found, plain(0.0, *arrays))


@pytest.mark.parametrize(
    ("below", "dtype"),
    slow_but(
        [(90, "float32"), (300, "bfloat16")],
        itertools.product([30, 90, 300], ["float32", "bfloat16"]),
    ),
)
def test_labels_on_a_shard_far_below_the_others(below, dtype, devices):
    """All that a device has may be nothing beside what another one has."""
    dtype = jnp.dtype(dtype)
    h, head, labels = inputs(dtype)
    h, head = jnp.abs(h) + 1, head / 8
    head = head.at[:, : V // 4].add(jnp.asarray(-below / D, dtype))
    labels = np.where(labels == IGNORED, IGNORED, labels % (V // 4)).astype(np.int32)
    found = on_mesh(mesh_of(devices, MESHES["tensor"]), 0.01, h, head, labels)
    wanted = plain(0.01, h, head, labels)
    assert_close(found[0], wanted[0], 1e-6)
    assert_close(found[1:], wanted[1:], 2e-6 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize("name", ["whole", "tensor and pipeline"])
def test_float16_holds_the_gradient_of_a_label_without_a_chance(name, devices):
    h, head, labels = inputs(jnp.float16)
    arrays = h * 4, head, labels
    found = on_mesh(mesh_of(devices, MESHES[name]), 0.0, *arrays)
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(found))
    wanted = plain(0.0, *(jnp.asarray(a, jnp.float32) for a in arrays[:2]), labels)
    assert_close(found[0], wanted[0], 2e-3)
    assert_close(found[1:], wanted[1:], 5e-3)


def test_a_slope_of_nothing_leaves_the_labels_part():
    """1 + 2 z lse is 0 for the row; the label's part of its gradient is -1."""
    row = jnp.full((1, 4), 0.25)
    of_row = [jnp.asarray([x], jnp.float32) for x in (4.0, 4.0)]  # base, lse
    label, logit = jnp.asarray([2]), jnp.asarray([4.0 + np.log(0.25)], jnp.float32)
    written, scale = in_a_mesh(
        loss._gradient, row, *of_row, label, logit, jnp.ones(1), z_loss=-1 / 8
    )
    np.testing.assert_allclose(written * scale, [[0, 0, -1, 0]], atol=1e-6)


def test_float16_keeps_the_gradient_of_a_label_that_is_nearly_sure():
    """1e-5 is below the numbers that float16 holds with all of its digits."""
    row = jnp.asarray([[1.0, 0, 0, 0]], jnp.float16)
    base = jnp.zeros(1)
    of_label = jnp.asarray([0]), jnp.asarray([np.log1p(-1e-5)], jnp.float32), jnp.ones(1)
    written, scale = in_a_mesh(loss._gradient, row, base, base, *of_label, z_loss=0.0)
    np.testing.assert_allclose(written * scale, [[-1e-5, 0, 0, 0]], rtol=1e-2)


def in_a_mesh(function, *arrays, **options):
    """A function of local arrays, on one device."""
    mesh, whole = make_mesh(ParallelConfig(data=1), jax.devices()[:1]), PartitionSpec()
    local = lambda *arrays: function(*varying(arrays), **options)  # noqa: E731
    run = jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(run)(*arrays)


@pytest.mark.parametrize("sure", [False, True], ids=["any label", "the likeliest"])
def test_bfloat16_gradients_are_near_those_of_a_rounded_gradient(sure):
    """Against float64; beside them, gradients by logits that are exact and then rounded."""
    rng = np.random.default_rng(0)
    h, head = (jnp.asarray(rng.normal(size=s) / 3, jnp.bfloat16) for s in ((256, 64), (64, 1024)))
    exact = [np.asarray(a, np.float64) for a in (h, head)]
    logits = np.asarray(jnp.asarray(exact[0] @ exact[1], jnp.bfloat16), np.float64)
    labels = (logits.argmax(1) if sure else rng.integers(0, 1024, 256)).astype(np.int32)

    def gradients(h, head):
        run = functools.partial(loss.cross_entropy, labels_N=labels, logits_dtype=jnp.bfloat16)
        _, vjp = jax.vjp(run, h, head)
        return vjp((jnp.float32(1), jnp.float32(0)))

    d = np.exp(logits - jax.nn.logsumexp(logits, axis=1, keepdims=True))
    d[np.arange(256), labels] -= 1
    rounded = np.asarray(jnp.asarray(d, jnp.bfloat16), np.float64)
    of = lambda d: (d @ exact[1].T, exact[0].T @ d)  # noqa: E731
    found = in_a_mesh(gradients, h, head)
    for ours, plain, wanted in zip(found, of(rounded), of(d), strict=True):
        plain = np.asarray(jnp.asarray(plain, jnp.bfloat16), np.float64)
        error = lambda a, b=wanted: np.linalg.norm(a - b) / np.linalg.norm(b)  # noqa: E731
        assert error(np.asarray(ours, np.float64)) < 1.5 * error(plain)


@pytest.mark.parametrize("name", ["whole", "tensor and pipeline"])
def test_rounded_logits_are_all_that_is_rounded(name, devices):
    """The loss and both gradients are those of logits that were bfloat16's to begin with."""
    h, head, labels = inputs(jnp.bfloat16)
    found = on_mesh(mesh_of(devices, MESHES[name]), 0.1, h, head, labels, dtype=jnp.bfloat16)
    wanted = plain(0.1, h, head, labels, dtype=jnp.bfloat16)
    assert_close(found[0], wanted[0], 1e-6)
    assert_close(found[1:], wanted[1:], 2e-2)
    exact = plain(0.1, h, head, labels)[0]
    assert not np.isclose(found[0][1], exact[1], rtol=1e-6)


def test_ignored_labels_count_for_nothing(devices):
    h, head, labels = inputs()
    mesh = mesh_of(devices, MESHES["tensor and pipeline"])
    _, d_h, _ = on_mesh(mesh, 0.1, h, head, labels)
    assert (np.asarray(d_h)[labels == IGNORED] == 0.0).all()
    assert (np.abs(np.asarray(d_h)[labels != IGNORED]).max(axis=1) > 0).all()
    sums, *grads = on_mesh(mesh, 0.1, h, head, np.full_like(labels, IGNORED))
    assert all((np.asarray(a) == 0.0).all() for a in (*sums, *grads))


def test_bfloat16_keeps_sums_in_float32(devices):
    arrays = inputs(jnp.bfloat16)
    (total, nll), d_h, d_head = on_mesh(mesh_of(devices, MESHES["tensor"]), 0.1, *arrays)
    assert total.dtype == nll.dtype == jnp.float32 and d_head.dtype == jnp.bfloat16
    wanted = plain(0.1, *arrays)
    assert_close((total, nll), wanted[0], 1e-6)
    assert_close((d_h, d_head), wanted[1:], 2e-2)


@pytest.mark.parametrize(
    ("num_tokens", "vocab_shard", "chunk_bytes", "chunks"),
    [
        (24, 16, 1 << 30, 1),
        (24, 16, 24 * 16 * 4, 1),
        (24, 16, 24 * 16 * 4 - 1, 2),
        (24, 16, 5 * 16 * 4, 5),  # the last chunk is filled up
        (7, 16, 6 * 16 * 4, 2),
        (24, 16, 16 * 4, 24),  # a token at a time
        (24, 16, 1, 24),  # and never less
    ],
)
def test_number_of_chunks(num_tokens, vocab_shard, chunk_bytes, chunks, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", chunk_bytes)
    assert loss.num_chunks(num_tokens, vocab_shard) == chunks
    asked_for = [loss.num_chunks(num_tokens, vocab_shard, n) for n in (1, 3, 1000)]
    assert asked_for == [1, 3, num_tokens]


def temporary_bytes(mesh, tokens: int, vocab: int, chunks: int = 0) -> int:
    """Of value and gradients in one compiled program."""
    h = jax.ShapeDtypeStruct((tokens, D), jnp.float32)
    head = jax.ShapeDtypeStruct((D, vocab), jnp.float32)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    run = functools.partial(on_mesh, mesh, 0.1, chunks=chunks)
    lowered = jax.jit(run).lower(h, head, labels)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_logits_are_never_whole(devices, monkeypatch):
    tokens, vocab = 512, 4096
    logits, mesh = tokens * vocab * 4, mesh_of(devices, {})
    assert temporary_bytes(mesh, tokens, vocab) > logits, "the measure sees them when they are"
    monkeypatch.setattr(loss, "CHUNK_BYTES", logits // 16)
    assert temporary_bytes(mesh, tokens, vocab) < logits / 3
    assert temporary_bytes(mesh, tokens, vocab, chunks=1) > logits, "unless they are asked for"


def test_memory_does_not_grow_with_the_logits(devices, monkeypatch):
    tokens, vocab, mesh = 512, 4096, mesh_of(devices, {})
    monkeypatch.setattr(loss, "CHUNK_BYTES", tokens * vocab * 4 // 16)
    few, many = (temporary_bytes(mesh, n * tokens, vocab) for n in (1, 4))
    hidden = 4 * tokens * D * 4
    assert many < few + 4 * hidden, "beside a chunk's logits, only what is as wide as the model"
    assert many < 4 * tokens * vocab * 4 / 8
