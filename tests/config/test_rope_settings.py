"""Settings of the rotary embedding that cannot work are refused, each with a fix that works."""

import re

import pytest

from jaxpar.config import Config, ConfigError, RopeScaling, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.validate import check
from tests.tiny import TINY

BASE = replace(TINY, **{"model.head_dim": 8, "parallel.layer_loop": "unroll"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("rope_fraction=0.0", "model.rope_fraction = 0.0: must be above 0"),
        ("rope_fraction=1.5", "must be above 0 and at most 1"),
        (
            "rope_fraction=0.1",
            "rotates 0 of model.head_dim = 8 dims",
        ),
        ("rope_fraction=0.4", "rotates 3 of model.head_dim = 8 dims"),
        ("nope_every=-1", "model.nope_every = -1: must not be negative"),
        ("nope_every=1", "leaves no layer with a rotary embedding"),
        ("local_rope_scaling=False", "needs model.global_every and model.rope_scaling"),
        ("rope_scaling.kind=linear rope_scaling.beta_fast=8.0", "needs kind yarn, not linear"),
        ("rope_scaling.truncate=False", "needs kind yarn, not llama3.*truncate True, or"),
        ("rope_scaling.attention_factor=1.0", "needs kind yarn or longrope, not llama3"),
        ("rope_scaling.kind=yarn rope_scaling.low_freq_factor=2.0", "needs kind llama3, not yarn"),
        ("rope_scaling.kind=yarn rope_scaling.attention_factor=0.0", "must be above 0"),
        ("rope_scaling.kind=yarn rope_scaling.beta_slow=40.0", "at most beta_fast = 32.0"),
        ("rope_scaling.kind=yarn rope_theta=1.0", "rope_theta = 1.0: must be above 1 for"),
        ("rope_scaling.kind=yarn rope_scaling.factor=0.5", "must be at least 1"),
        ("rope_scaling.kind=longrope", "short_factors = '': must be 4 numbers above 0"),
        (
            "rope_scaling.kind=longrope rope_scaling.short_factors=1,1,1,1 "
            "rope_scaling.long_factors=1,2,3",
            "long_factors = '1,2,3': must be 4 numbers",
        ),
        (
            "rope_scaling.kind=longrope rope_scaling.short_factors=1,1,1,0",
            "short_factors = '1,1,1,0': must be 4 numbers above 0",
        ),
    ],
)
def test_what_cannot_be(settings, said):
    args = [f"--model.{word.replace('=', ' ')}".split() for word in settings.split()]
    cfg = parse_overrides(BASE, [part for words in args for part in words])
    with pytest.raises(ConfigError, match=said) as error:
        check(cfg)
    (fix,) = re.findall(r"Fix: use (.*?)(?:, or .*)?\.$", str(error.value))
    if "longrope" not in settings:  # two fields are wrong there, and an error names one
        check(parse_overrides(cfg, fix.split()))


def test_layers_without_a_rotary_embedding_are_unrolled():
    with pytest.raises(ConfigError, match=r"layer_loop = .scan.: must be unroll.*nope_every is 2"):
        check(replace(TINY, **{"model.nope_every": 2}))


def test_stages_begin_with_a_period_of_all_kinds_of_layers():
    pipeline = {"parallel.pipeline": 2, "parallel.num_microbatches": 2}
    cfg = replace(BASE, **pipeline, **{"model.nope_every": 3, "model.num_layers": 5})
    check(cfg)
    with pytest.raises(ConfigError, match=r"at least 4: 3 layers .* after 3, by model\.nope_every"):
        check(replace(cfg, **{"model.num_layers": 3}))
    both = {"model.global_every": 2, "model.sliding_window": 4}
    rule = r"at least 7: 6 layers .* repeat after 6, by model\.global_every and model\.nope"
    with pytest.raises(ConfigError, match=rule):
        check(replace(cfg, **both))


def test_a_kind_on_the_command_line_keeps_what_the_config_has():
    cfg = replace(Config(), **{"model.rope_scaling": RopeScaling(factor=32.0)})
    args = ["--model.rope-scaling.kind", "yarn", "--model.rope-scaling.beta-fast", "16"]
    found = parse_overrides(cfg, args).model.rope_scaling
    assert found == RopeScaling(kind="yarn", factor=32.0, beta_fast=16.0)
