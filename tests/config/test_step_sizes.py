"""The sizes of steps: what the schedules say, and what they may not say."""

import pytest

from jaxpar.config import BatchSize, Config, ConfigError, SequenceLength, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.lists.step_sizes import StepSize, config_of, sequences_before, step_sizes
from jaxpar.config.validate import check, resolve

BASE = replace(
    Config(),
    **{
        "train.global_batch_size": 32,
        "data.seq_len": 64,
        "parallel.num_microbatches": 4,
        "train.batch_schedule": (BatchSize(0, 8), BatchSize(100, 16), BatchSize(300, 32)),
    },
)
SHORT = {"data.length_schedule": (SequenceLength(0, 16), SequenceLength(200, 64))}


def microbatches(cfg: Config) -> list[int]:
    return [config_of(cfg, size).parallel.num_microbatches for size in step_sizes(cfg).sizes]


def test_a_smaller_batch_has_fewer_microbatches_of_the_same_size():
    cfg = resolve(BASE, 4)
    found = step_sizes(cfg)
    assert found.sizes == (StepSize(0, 8, 64), StepSize(100, 16, 64), StepSize(300, 32, 64))
    assert microbatches(cfg) == [1, 2, 4]
    assert config_of(cfg, found.sizes[-1]) == replace(cfg, **{"train.batch_schedule": ()})
    rows = {size.rows // n for size, n in zip(found.sizes, microbatches(cfg), strict=True)}
    assert rows == {8}


def test_tokens_are_counted_step_by_step():
    found = step_sizes(BASE)
    total = 0
    for step in range(400):
        assert found.tokens_before(step) == total
        assert found.steps_of(total) == step or total == 0
        assert found.steps_of(total + 1) == step + 1
        assert sequences_before(BASE, step) * 64 == total
        total += found.at(step).tokens
    assert found.at(10**9) == found.sizes[-1]
    assert list(found.until(150, first=90)) == [(found.sizes[0], 10), (found.sizes[1], 50)]


def test_shorter_sequences_are_more_or_the_step_has_fewer_tokens():
    cfg = resolve(replace(BASE, **SHORT), 4)
    assert step_sizes(cfg).sizes == (
        StepSize(0, 32, 16),
        StepSize(100, 64, 16),
        StepSize(200, 16, 64),
        StepSize(300, 32, 64),
    )
    assert microbatches(cfg) == [1, 2, 2, 4]
    cfg = resolve(replace(cfg, **{"data.length_keeps": "sequences"}), 4)
    assert [size[1:] for size in step_sizes(cfg).sizes] == [(8, 16), (16, 16), (16, 64), (32, 64)]
    assert microbatches(cfg) == [1, 1, 2, 4]


def test_a_run_may_end_by_tokens_within_a_schedule():
    at = step_sizes(BASE).tokens_before(150)
    for more, steps in ((0, 150), (1, 151)):
        cfg = resolve(replace(BASE, **{"train.num_tokens": at + more}), 1)
        assert cfg.train.num_steps == steps


def test_sizes_move_to_the_steps_that_use_their_batches():
    """As when batches are skipped."""
    found = step_sizes(BASE).moved(lambda batch: max(batch - 50, 0))
    assert found.sizes == (StepSize(0, 8, 64), StepSize(50, 16, 64), StepSize(250, 32, 64))
    found = step_sizes(BASE).moved(lambda batch: max(batch - 100, 0))
    assert found.sizes == (StepSize(0, 16, 64), StepSize(200, 32, 64))


BATCHES, LENGTHS = "train.batch_schedule", "data.length_schedule"


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        (BATCHES, "8", "must be a list of STEP:SEQUENCES.*, but '8' has no sequences"),
        (BATCHES, "0:8,x:32", "'x' is not a whole number.*Fix: use --train.batch-schedule 0:8"),
        (BATCHES, "0:8:9,9:32", "'0:8:9' has more than STEP:SEQUENCES"),
        (BATCHES, "5:8,9:32", "must begin with step 0, but begins with 5"),
        (BATCHES, "0:8,9:16,9:32", "has the step 9 twice"),
        (BATCHES, "0:8,9:16,5:32", "must have ascending steps, but has 0, 9, 5"),
        (BATCHES, f"0:8,{10**30}:32", r"batch_schedule\[1\].step = 10+: must be at most 2,147,4"),
        (BATCHES, "0:0,9:32", r"batch_schedule\[0\]\.sequences = 0: must be at least 1"),
        (BATCHES, "0:8,9:16", "size is 32.*--train.global-batch-size 16"),
        (BATCHES, "0:8,9:64", "size of 64, but train.global_batch_size is 32"),
        (BATCHES, "0:12,9:32", "multiples of 8, the sequences of a microbatch"),
        (BATCHES, ",".join(f"{n}:32" for n in range(200)), "has 200 items, more than 100"),
        (LENGTHS, "0:24,9:64", "lengths that divide data.seq_len = 64"),
        (LENGTHS, "0:64,9:128", "but data.seq_len is 64.*--data.seq-len 128"),
        (LENGTHS, "5:64", "must begin with step 0, but begins with 5"),
    ],
)
def test_a_bad_schedule_is_one_error(path, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        check(parse_overrides(BASE, [f"--{path}={text}"]))
    assert caught.value.field.startswith(path)


def test_each_size_has_to_fit_the_mesh():
    with pytest.raises(ConfigError, match=r"length_schedule = .* data\.seq_len = 16 must be divis"):
        resolve(replace(BASE, **SHORT, **{"parallel.sequence": 4, "parallel.tensor": 4}), 32)
    rounds = {"parallel.pipeline": 4, "parallel.virtual_stages": 2, "model.num_layers": 8}
    with pytest.raises(ConfigError, match=r"batch_schedule = .* has 8 seq.*num_microbatches = 1"):
        resolve(replace(BASE, **rounds), 4)
    few = {BATCHES: (BatchSize(0, 8), BatchSize(9, 32)), "parallel.num_microbatches": 1}
    with pytest.raises(ConfigError, match=r"Fix: use .*, or --parallel\.num-microbatches 4"):
        resolve(replace(BASE, **few), 8)
    with pytest.raises(ConfigError, match=r"Fix: use --train\.batch-schedule ''"):
        resolve(replace(BASE, **few), 16)


def test_a_batch_has_whole_sequences_of_the_longest_length():
    cfg = replace(BASE, **SHORT, **{"data.length_keeps": "sequences"})
    cfg = replace(
        cfg,
        **{
            "train.batch_schedule": (BatchSize(0, 2), BatchSize(9, 32)),
            "parallel.num_microbatches": 16,
        },
    )
    with pytest.raises(ConfigError, match="into 4 of 16 tokens, which does not divide a ba"):
        check(cfg)


def test_what_stays_needs_lengths_that_change():
    with pytest.raises(ConfigError, match=r"length_keeps = 'sequences': needs data\.length_sched"):
        check(replace(BASE, **{"data.length_keeps": "sequences"}))
