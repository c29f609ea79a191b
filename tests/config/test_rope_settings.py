"""Settings of the rotary embedding that cannot work are refused, each with a fix that works."""

import dataclasses
import re

import pytest

from jaxpar.config import ConfigError, Layer, RopeScaling, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.validate import check
from tests.tiny import ATTENTION, GLU, TINY

ROPE = "model.layers.mixer.rope"
BASE = replace(TINY, **{"model.layers.mixer.head_dim": 8, "parallel.layer_loop": "unroll"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("fraction=0.0", "rope.fraction = 0.0: must be above 0"),
        ("fraction=1.5", "must be above 0 and at most 1"),
        ("fraction=0.1", "rotates 0 of head_dim = 8 dims"),
        ("fraction=0.4", "rotates 3 of head_dim = 8 dims"),
        ("scaling.kind=linear scaling.beta_fast=8.0", "needs kind yarn, not linear"),
        ("scaling.truncate=False", "needs kind yarn, not llama3.*truncate True, or"),
        ("scaling.attention_factor=1.0", "needs kind yarn or longrope, not llama3"),
        ("scaling.kind=yarn scaling.low_freq_factor=2.0", "needs kind llama3, not yarn"),
        ("scaling.kind=yarn scaling.attention_factor=0.0", "must be above 0"),
        ("scaling.kind=yarn scaling.beta_slow=40.0", "at most beta_fast = 32.0"),
        ("scaling.kind=yarn theta=1.0", "rope.theta = 1.0: must be above 1 for"),
        ("scaling.kind=yarn scaling.factor=0.5", "must be at least 1"),
        ("scaling.turning=0.0", "turning = 0.0: must be above 0 and at most 1"),
        ("scaling.kind=linear scaling.turning=0.5", "needs kind proportional, not linear"),
        ("scaling.kind=longrope", "short_factors = '': must be 4 numbers above 0"),
        (
            "scaling.kind=longrope scaling.short_factors=1,1,1,1 scaling.long_factors=1,2,3",
            "long_factors = '1.0,2.0,3.0': must be 4 numbers",
        ),
        (
            "scaling.kind=longrope scaling.short_factors=1,1,1,0",
            "short_factors = '1.0,1.0,1.0,0.0': must be 4 numbers above 0",
        ),
    ],
)
def test_what_cannot_be(settings, said):
    cfg = parse_overrides(BASE, [f"--{ROPE}.{word}" for word in settings.split()])
    with pytest.raises(ConfigError, match=said) as error:
        check(cfg)
    if "longrope" not in settings:  # two fields are wrong there
        (fix,) = re.findall(r"Fix: use (.*?)(?:, or .*)?\.$", str(error.value))
        check(parse_overrides(cfg, fix.split()))


def test_stages_begin_with_a_period_of_all_kinds_of_layers():
    rotated = Layer("layers", ATTENTION, GLU)
    nope = Layer("nope", dataclasses.replace(ATTENTION, rope=None), GLU)
    five = [rotated, rotated, nope, rotated, rotated]
    pipeline = {"parallel.pipeline": 2, "parallel.num_microbatches": 2}
    check(replace(BASE, **pipeline, **{"model.layers": five}))
    with pytest.raises(ConfigError, match=r"at least 4: 3 layers .* the layers repeat after 3"):
        check(replace(BASE, **pipeline, **{"model.layers": five[:3]}))


def test_a_kind_on_the_command_line_keeps_what_the_config_has():
    cfg = replace(BASE, **{f"{ROPE}.scaling": RopeScaling(factor=32.0)})
    args = [f"--{ROPE}.scaling.kind", "yarn", f"--{ROPE}.scaling.beta-fast", "16"]
    found = parse_overrides(cfg, args).model.layers[0].mixer.rope.scaling
    assert found == RopeScaling(kind="yarn", factor=32.0, beta_fast=16.0)
