"""Fields that follow from others and from the devices."""

import pytest

from jaxpar.config import Config, ConfigError, Source, replace
from jaxpar.config.command_line import parse_overrides, read_config
from jaxpar.config.validate import check, resolve


@pytest.mark.parametrize(
    ("devices", "fields", "count"),
    [
        (1, {}, 16),
        (4, {}, 4),
        (4, {"parallel.tensor": 2}, 8),
        (4, {"parallel.num_microbatches": 4}, 4),
        (4, {"parallel.pipeline": 2, "parallel.virtual_stages": 2}, 8),
    ],
)
def test_the_size_of_microbatches_gives_their_number(devices, fields, count):
    cfg = replace(Config(), **{"train.micro_batch_size": 2}, **fields)
    check(cfg)
    found = resolve(cfg, devices)
    assert found.parallel.num_microbatches == count
    assert resolve(found, devices) == found


@pytest.mark.parametrize(
    ("tokens", "steps"), [(1, 1), (32 * 1024, 1), (32 * 1024 + 1, 2), (10**9, 30518)]
)
def test_a_length_in_tokens_is_the_fewest_steps(tokens, steps):
    cfg = resolve(replace(Config(), **{"train.num_tokens": tokens}), 1)
    assert cfg.train.num_steps == steps


def test_a_length_of_too_many_steps_names_its_field():
    with pytest.raises(ConfigError, match=r"train\.num_tokens = .* more than 2147483647"):
        check(replace(Config(), **{"train.num_tokens": 10**16, "data.seq_len": 128}))


def test_rules_read_the_steps_of_a_length_in_tokens():
    long = {"train.num_tokens": 10**9, "profile.start": 20_000}
    check(replace(Config(), **long))
    with pytest.raises(ConfigError, match="num_steps is 31"):
        check(replace(Config(), **(long | {"train.num_tokens": 10**6})))


def test_a_command_line_gives_one_length():
    read = lambda *words: read_config(["quickstart", *words]).train  # noqa: E731
    assert read("--train.num-tokens", "40960").num_steps == 10
    with pytest.raises(ConfigError, match=r"train\.num_tokens = 9.* Fix: use one of both"):
        read("--train.num-tokens", "9", "--train.num-steps", "5")
    base = replace(Config(), **{"train.num_tokens": 10**6})
    cfg = parse_overrides(base, ["--train.num-steps", "7"])
    assert (cfg.train.num_steps, cfg.train.num_tokens) == (7, 0)
    with pytest.raises(ConfigError, match=r"train\.num_epochs = 2.0: sets train\.num_tokens"):
        parse_overrides(base, ["--train.num-epochs", "2", "--train.num-tokens", "9"])
    cfg = parse_overrides(base, ["--train.num-epochs", "2"])
    assert (cfg.train.num_epochs, cfg.train.num_tokens) == (2, 0)
    cfg = parse_overrides(cfg, ["--train.num-tokens", "32768"])
    assert (cfg.train.num_epochs, cfg.train.num_steps) == (0, 1)
    cfg = parse_overrides(cfg, ["--train.num-epochs", "0", "--train.num-steps", "3"])
    assert cfg.train.num_steps == 3


def test_a_length_in_epochs_is_unknown_before_the_data_is_open():
    epochs = {"train.num_epochs": 1.5, "profile.start": 20_000}
    check(replace(Config(), **epochs))
    for other, said in (
        ({"train.num_tokens": 10}, r"is not supported with train\.num_tokens = 10"),
        (
            {"data.mixture": (Source("a", 1.0), Source("b", 1.0))},
            "each source has its own passes",
        ),
        ({"train.num_epochs": -1.0}, "must not be negative"),
        ({"train.num_epochs": float("nan")}, "must be finite"),
    ):
        with pytest.raises(ConfigError, match=rf"train\.num_epochs = .*{said}"):
            check(replace(Config(), **(epochs | other)))


def test_a_batch_in_tokens():
    tokens = {"train.global_batch_tokens": 4096, "data.seq_len": 128}
    for cfg in (
        parse_overrides(Config(), flags_of(tokens)),
        resolve(replace(Config(), **tokens), 1),
    ):
        assert (cfg.train.global_batch_size, cfg.train.global_batch_tokens) == (32, 0)
    check(replace(Config(), **tokens))
    base = replace(Config(), **tokens)
    cfg = parse_overrides(base, ["--train.global-batch-size", "7"])
    assert (cfg.train.global_batch_size, cfg.train.global_batch_tokens) == (7, 0)
    assert parse_overrides(base, ["--data.seq-len", "64"]).train.global_batch_size == 64
    longer = parse_overrides(base, ["--train.num-tokens", "8193"])
    assert longer.train.num_steps == 3
    for values, said in (
        ({"train.global_batch_tokens": 1000}, "1000: must be a multiple of .*= 128.*tokens 1024"),
        ({"train.global_batch_tokens": 5}, "5: must be a multiple .*tokens 128"),
        ({"train.global_batch_tokens": -1}, "-1: must not be negative"),
        ({"train.global_batch_size": 8}, "4096: sets train.global_batch_size, .*one of both"),
    ):
        with pytest.raises(ConfigError, match=f"train.global_batch_tokens = {said}"):
            check(parse_overrides(Config(), flags_of(tokens | values)))


def flags_of(values: dict) -> list[str]:
    return [f"--{path}={value}" for path, value in values.items()]
