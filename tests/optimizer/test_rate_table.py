"""The learning rates as an input of the step: the same update, by one program for all schedules."""

import jax
import numpy as np
import pytest

from jaxpar.certification import traces
from jaxpar.config import replace
from jaxpar.config.validate import resolve
from jaxpar.optimizer.schedules import MIN_LENGTH, learning_rate, rate_table, schedule_of
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.state import abstract_state, init_state, state_shardings
from jaxpar.step.train_step import make_train_step
from tests.slow import slow
from tests.tiny import TINY

INPUT = {"optimizer.schedule_as_input": True}

#: Schedules that a sweep may have, each of another shape.
SCHEDULES = (
    {"optimizer.learning_rate": 3e-3},
    {"optimizer.warmup_steps": 3, "optimizer.min_lr_ratio": 0.5},
    {"optimizer.schedule": "wsd", "optimizer.decay_steps": 2, "train.num_steps": 8},
    {"optimizer.schedule": "constant", "train.num_steps": 500, "train.seed": 3},
    {"optimizer.schedule": "linear", "optimizer.warmup_fraction": 0.3},
)


@pytest.mark.parametrize("fields", SCHEDULES)
def test_the_table_is_the_schedule(fields):
    cfg = replace(TINY, **fields)
    steps = cfg.train.num_steps
    table = rate_table(cfg.optimizer, steps)
    assert table.dtype == np.float32 and len(table) == MIN_LENGTH
    schedule = jax.jit(jax.vmap(learning_rate(cfg.optimizer, steps)))
    np.testing.assert_allclose(table, schedule(np.arange(MIN_LENGTH)), rtol=1e-6)
    looked_up = schedule_of(jax.numpy.asarray(table))
    assert looked_up(5) == table[5] and looked_up(2 * MIN_LENGTH) == table[-1]


def test_a_long_run_has_a_longer_table():
    assert len(rate_table(TINY.optimizer, MIN_LENGTH - 1)) == MIN_LENGTH
    assert len(rate_table(TINY.optimizer, MIN_LENGTH)) == 2 * MIN_LENGTH


def placed(cfg, devices):
    cfg = resolve(cfg, devices)
    return cfg, make_mesh(cfg.parallel, jax.devices()[:devices])


def lowered(fields: dict) -> str:
    """The text of the step of two devices."""
    cfg, mesh = placed(replace(TINY, **fields), 2)
    like = lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)  # noqa: E731
    state = jax.tree.map(like, abstract_state(cfg), state_shardings(cfg, mesh))
    batch = traces.shard_batch(traces.random_batch(cfg), cfg, mesh)
    return make_train_step(cfg, mesh).lower(state, batch).as_text()


@pytest.mark.slow  # quicker: the table is the schedule, above
def test_all_schedules_have_one_program_only_as_an_input():
    first = lowered(INPUT)
    assert all(lowered(INPUT | fields) == first for fields in SCHEDULES)
    assert lowered(SCHEDULES[0]) != lowered({})  # otherwise each has its own


@pytest.mark.parametrize(
    ("devices", "fields"),
    [
        (2, {"optimizer.name": "lion", "parallel.tensor": 2}),
        slow(1, {"optimizer.name": "muon", "optimizer.first_moment_dtype": "bfloat16"}),
        slow(4, {"parallel.pipeline": 2, "parallel.num_microbatches": 2}),
        slow(2, {"optimizer.name": "adafactor"}),
        slow(2, {"optimizer.name": "sgd"}),
    ],
)
def test_steps_are_the_same_with_and_without(devices, fields):
    """Three steps of a warm-up, in which every rate differs."""
    ends = []
    for more in ({}, INPUT):
        own = {"optimizer.warmup_steps": 3, "model.num_layers": 2, **fields, **more}
        cfg, mesh = placed(replace(TINY, **own), devices)
        step, state = make_train_step(cfg, mesh), init_state(cfg, mesh)
        for index in range(3):
            batch = traces.shard_batch(traces.random_batch(cfg, index), cfg, mesh)
            state, metrics = step(state, batch)
        ends.append(jax.tree.map(np.asarray, (state.params, metrics["loss"])))
    start = jax.tree.map(np.asarray, init_state(cfg, mesh).params)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)  # noqa: E731
    jax.tree.map(close, *ends)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), ends[1][0], start)
    assert min(jax.tree.leaves(moved)) > 1e-4  # far more than the tolerance
