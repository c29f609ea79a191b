"""Batches whose size changes by schedule: the same text in the same order, cut otherwise."""

import jax
import numpy as np
import pytest

from jaxpar.config import BatchSize, Config, ParallelConfig, SequenceLength, replace
from jaxpar.config.validate import resolve
from jaxpar.data.loader import Loader, with_epochs
from jaxpar.data.skips import SkippedBatches
from jaxpar.parallel.context import order_of, token_order
from jaxpar.sharding.mesh import make_mesh

BATCH, LENGTH = 8, 32
BATCHES = {"train.batch_schedule": (BatchSize(0, 2), BatchSize(3, 4), BatchSize(7, 8))}
LENGTHS = {
    "data.length_schedule": (SequenceLength(0, 8), SequenceLength(5, 32), SequenceLength(9, 16))
}
STEPS = 12


@pytest.fixture
def cfg(dataset) -> Config:
    values = {"data.path": str(dataset), "data.seq_len": LENGTH, "train.global_batch_size": BATCH}
    return replace(Config(), **values)


def loader_of(cfg: Config, **axes: int) -> Loader:
    number = int(np.prod(list(axes.values()), initial=1))
    parallel = ParallelConfig(**({"data": 1} | axes))
    mesh = make_mesh(parallel, jax.devices()[:number])
    cfg = replace(cfg, **{f"parallel.{axis}": size for axis, size in axes.items()})
    return Loader(cfg, mesh, order=lambda length: order_of(cfg, length))


def text_of(loader: Loader, steps: int) -> np.ndarray:
    """The tokens of some steps, one sequence of LENGTH after another."""
    batches = [np.asarray(loader.batch(step).tokens) for step in range(steps)]
    return np.concatenate([batch.reshape(-1) for batch in batches]).reshape(-1, LENGTH)


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        (BATCHES, [(2, 32)] * 3 + [(4, 32)] * 4 + [(8, 32)] * 5),
        (LENGTHS, [(32, 8)] * 5 + [(8, 32)] * 4 + [(16, 16)] * 3),
        (
            LENGTHS | {"data.length_keeps": "sequences"},
            [(8, 8)] * 5 + [(8, 32)] * 4 + [(8, 16)] * 3,
        ),
        (
            BATCHES | LENGTHS,
            [(8, 8)] * 3 + [(16, 8)] * 2 + [(4, 32)] * 2 + [(8, 32)] * 2 + [(16, 16)] * 3,
        ),
    ],
)
def test_a_schedule_cuts_the_same_text_otherwise(fields, shapes, cfg):
    loader, plain = loader_of(replace(cfg, **fields)), loader_of(cfg)
    assert [loader.batch(step).tokens.shape for step in range(STEPS)] == shapes
    assert [loader.abstract_batch(step).labels.shape for step in range(STEPS)] == shapes
    text = text_of(loader, STEPS)
    np.testing.assert_array_equal(text, text_of(plain, STEPS)[: len(text)])
    for step in range(STEPS):
        batch = jax.device_get(loader.batch(step))
        inside = batch.labels[:, :-1] >= 0
        np.testing.assert_array_equal(batch.labels[:, :-1][inside], batch.tokens[:, 1:][inside])
        assert (batch.positions[:, 0] == 0).all()


@pytest.mark.parametrize("axes", [{"data": 2}, {"replica": 2, "sequence": 2}, {"sequence": 4}])
def test_every_mesh_has_the_same_batches(axes, cfg):
    cfg = replace(cfg, **BATCHES, **LENGTHS)
    one, other = loader_of(cfg), loader_of(cfg, **axes)
    for step, batch in zip(range(STEPS), other.prefetched(0), strict=False):
        wanted, length = one.batch(step), one.batch(step).tokens.shape[1]
        order = token_order(ParallelConfig(**axes), length)
        where = slice(None) if order is None else order
        for name in ("tokens", "labels", "segment_ids", "positions"):
            found = np.asarray(getattr(batch[1], name))
            np.testing.assert_array_equal(found, np.asarray(getattr(wanted, name))[:, where])


def test_a_batch_has_its_number_s_size_even_if_others_are_skipped(cfg):
    loader, plain = (loader_of(replace(cfg, **BATCHES)) for _ in range(2))
    loader.skipped = SkippedBatches().and_also([(1, 3), (6, 2)])
    batches = [0, 4, 5, 8, 9, 10]
    for step, batch in enumerate(batches):
        found, wanted = loader.batch(step).tokens, plain.batch(batch).tokens
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
        assert loader.sizes_of_steps.at(step)[1:] == found.shape
    tokens = sum(plain.batch(batch).tokens.size for batch in batches)
    assert loader.sizes_of_steps.tokens_before(len(batches)) == tokens


def test_held_out_batches_have_the_largest_size(cfg):
    cfg = replace(cfg, **BATCHES, **LENGTHS)
    mesh = make_mesh(ParallelConfig(data=1), jax.devices()[:1])
    assert Loader(cfg, mesh, "val").batch(0).tokens.shape == (BATCH, LENGTH)


@pytest.mark.parametrize(("epochs", "fields"), [(1.0, {}), (2.5, BATCHES), (0.001, LENGTHS)])
def test_a_length_in_epochs(epochs, fields, cfg):
    """The fewest steps with so many passes; then the config needs no data to say so."""
    found = with_epochs(replace(cfg, **fields, **{"train.num_epochs": epochs}))
    steps = resolve(replace(found, **{"parallel.num_microbatches": 4}), 1).train.num_steps
    loader = loader_of(replace(cfg, **fields))
    (each,), path = loader.sequences_per_epoch, str(cfg.data.path)
    wanted = max(np.ceil(epochs * each), 1) / each
    assert loader.epochs(steps - 1)[path] < wanted <= loader.epochs(steps)[path]
    assert with_epochs(found) == found and found.train.num_epochs == 0


def test_epochs_count_text(cfg):
    loader, plain = loader_of(replace(cfg, **BATCHES)), loader_of(cfg)
    (path,) = loader.epochs(0)
    rows = sum(len(loader.batch(step).tokens) for step in range(STEPS))
    assert loader.epochs(STEPS)[path] == pytest.approx(plain.epochs(1)[path] * rows / BATCH)
