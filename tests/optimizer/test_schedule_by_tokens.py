"""Learning rates that count tokens: a smaller step counts as its share of the largest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import BatchSize, Config, ConfigError, SequenceLength, StepShare, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.lists.step_sizes import counted, step_sizes
from jaxpar.config.validate import check, resolve
from jaxpar.optimizer.schedules import learning_rate, shortened

STEPS = 60


def lengths(*pairs: tuple[int, int]) -> tuple[SequenceLength, ...]:
    return tuple(SequenceLength(*pair) for pair in pairs)


CFG = resolve(
    replace(
        Config(),
        **{
            "train.num_steps": STEPS,
            "parallel.num_microbatches": 4,
            "train.batch_schedule": (BatchSize(0, 8), BatchSize(12, 16), BatchSize(30, 32)),
            "data.length_schedule": lengths((0, 512), (6, 256), (8, 512), (20, 1024)),
            "data.length_keeps": "sequences",
            "optimizer.schedule_by": "tokens",
            "optimizer.warmup_steps": 5,
        },
    ),
    1,
)
WHOLE = CFG.train.global_batch_size * CFG.data.seq_len


def rates(cfg, num_steps: int, at) -> np.ndarray:
    return np.asarray(jax.vmap(learning_rate(cfg, num_steps))(jnp.asarray(at)))


def test_the_shares_are_of_tokens():
    pairs = [(one.step, one.share) for one in CFG.optimizer.schedule_by]
    assert pairs == [(0, 0.125), (6, 0.0625), (8, 0.125), (12, 0.25), (20, 0.5), (30, 1.0)]
    sizes = step_sizes(CFG)
    for steps in (0, 1, 12, 13, 25, 30, 31, STEPS):
        assert counted(CFG.optimizer, steps) == sizes.tokens_before(steps) / WHOLE
    assert resolve(CFG, 1) == CFG
    kept = {"data.length_schedule": lengths((0, 256), (12, 512), (30, 1024))}
    kept |= {"train.batch_schedule": (BatchSize(0, 16), BatchSize(30, 32))}
    kept |= {"data.length_keeps": "tokens", "optimizer.schedule_by": "tokens"}
    assert resolve(replace(CFG, **kept), 1).optimizer.schedule_by == (
        StepShare(0, 0.5),
        StepShare(30, 1.0),
    )
    even = {"train.batch_schedule": (), "data.length_schedule": (), "data.length_keeps": "tokens"}
    even |= {"optimizer.schedule_by": "tokens"}
    assert resolve(replace(CFG, **even), 1).optimizer.schedule_by == "steps"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_rate_is_that_of_a_run_of_whole_steps_after_as_many_tokens(schedule):
    by_tokens = dataclasses.replace(CFG.optimizer, schedule=schedule)
    by_steps = dataclasses.replace(by_tokens, schedule_by="steps")
    at = np.array([counted(by_tokens, step) for step in range(STEPS + 1)])
    whole = int(np.ceil(at[-1]))
    found = rates(by_tokens, STEPS, np.arange(STEPS + 1))
    np.testing.assert_allclose(found, rates(by_steps, whole, at.astype(np.float32)), rtol=1e-6)
    exactly = at == np.round(at)
    wanted = rates(by_steps, whole, at[exactly].astype(np.int32))
    np.testing.assert_allclose(found[exactly], wanted, rtol=1e-6)
    assert (np.diff(found[:18]) >= 0).all() and found[17] < by_tokens.learning_rate * 1.0001


def test_a_warm_up_longer_than_the_tokens_is_shortened():
    cfg = dataclasses.replace(CFG.optimizer, warmup_steps=100)
    assert shortened(cfg, STEPS).startswith("3 steps, not optimizer.warmup_steps = 100")


@pytest.mark.parametrize(
    "text", ["token", "", "0:0", "0:1.5", "5:1", "0:1,0:0.5", "0:x", "0:nan", "0:1,9"]
)
def test_what_cannot_be_counted_is_one_error(text):
    with pytest.raises(ConfigError, match=r"schedule_by(\[\d\]\.\w+)? = .*Fix: use --opt"):
        check(parse_overrides(Config(), [f"--optimizer.schedule-by={text}"]))
