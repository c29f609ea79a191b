"""Lists of a config: written and read by one grammar, saved as JSON, and refused item by item."""

import json
import re
from pathlib import Path

import pytest

import jaxpar
from jaxpar.config import (
    Config,
    ConfigError,
    EvaluationSet,
    LossWeight,
    MixtureWeights,
    RematSlice,
    RematValue,
    Source,
    flag,
    replace,
)
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.explain import options_in
from jaxpar.config.fields import field_types
from jaxpar.config.listed import item_of, members, read_value, written
from jaxpar.config.serialize import from_json, to_json, value_text
from jaxpar.config.validate import check
from tests.config.models import lists_of, setting

LISTS = {path: item_of(hint) for path, hint in field_types().items() if item_of(hint) is not None}


@pytest.mark.parametrize("path", LISTS)
def test_a_list_comes_back_from_a_command_line_and_from_json(path):
    for value in [(), *lists_of(LISTS[path])]:
        needed = {p: v for p, v in setting(path, value).items() if p != path}
        base = replace(Config(), **needed)
        cfg = replace(base, **{path: value})
        assert read_value(written(value), field_types()[path]) == value
        assert from_json(to_json(cfg)) == cfg
        assert parse_overrides(base, options_in(flag(path, value))) == cfg
        section, name = path.split(".")
        assert value_text(path, json.loads(to_json(cfg))[section][name]) == written(value)


WEB, CODE = Source("web", 0.7), Source("s3://bucket/code", 0.3)
STAGES = MixtureWeights(5, (1, 0)), MixtureWeights(9, (0, 1))
SETS = EvaluationSet("a", "b:c"), EvaluationSet("d", "e", "test"), EvaluationSet("f", "g:val")
ALONE = (RematValue("attn_out"),)
SLICES = (
    RematSlice("full", step=2),
    RematSlice("dots", -2),
    RematSlice((RematValue("qkv", "host"), RematValue("qk")), stop=8),
)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("data.mixture", "web:0.7, s3://bucket/code:3e-1", (WEB, CODE)),
        ("data.mixture", "[a,b]:1,[[c]]:2", (Source("a,b", 1), Source("[c]", 2))),
        ("data.mixture_schedule", "5:[1,0],9:[0,1]", STAGES),
        ("data.mixture_schedule", "5:1", (MixtureWeights(5, (1,)),)),
        ("evaluation.sets", "a:b:c,d:e:test,f:g:val:", SETS),
        ("parallel.remat_layers", "full:::2,dots:-2,[qkv:host,qk]::8", SLICES),
        ("train.z_loss_schedule", "0:1e-4,9:0", (LossWeight(0, 1e-4), LossWeight(9, 0))),
        ("parallel.layers_per_stage", "3, 1", (3, 1)),
        ("parallel.auto", "all", ("all",)),
        ("lora.targets", "q_proj, o_proj", ("q_proj", "o_proj")),
        ("parallel.remat", "attn_out", "attn_out"),
        ("parallel.remat", "[attn_out]", ALONE),
        ("parallel.remat", "attn_out:host,qk", (RematValue("attn_out", "host"), RematValue("qk"))),
        (
            "parallel.remat_layers",
            "[attn_out]::8",
            (RematSlice(ALONE, stop=8),),
        ),
        ("optimizer.schedule_by", "tokens", "tokens"),
        ("data.mixture", "", ()),
    ],
)
def test_the_grammar(path, text, value):
    assert read_value(text, field_types()[path]) == value
    assert read_value(written(value), field_types()[path]) == value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("data.mixture", [WEB], "data.mixture = .*must be a list of PATH:WEIGHT"),
        ("data.mixture", (WEB, ("b", 2)), r"mixture\[1\] = 'b,2': must be a Source.*web:0.7\."),
        ("data.mixture", (Source("web", "x"),), r"\[0\]\.weight = 'x': must be a number"),
        (
            "data.mixture_schedule",
            (MixtureWeights(1, (1, None)),),
            r"data\.mixture_schedule\[0\]\.weights\[1\] = None: must be a number",
        ),
        (
            "evaluation.sets",
            (EvaluationSet("a", "b", "tset"),),
            r"sets\[0\]\.split = 'tset': must be one of train, val, test or None",
        ),
        ("parallel.layers_per_stage", (1, "x"), r"stage\[1\] = 'x': must be a whole number"),
    ],
)
def test_an_item_of_another_type_is_named(path, value, said):
    with pytest.raises(ConfigError, match=said) as caught:
        check(replace(Config(), **{path: value}))
    parse_overrides(Config(), options_in(caught.value.fix.removeprefix("use ")))


@pytest.mark.parametrize(
    ("path", "text", "fix"),
    [
        ("parallel.remat", "qkv,atn_out", "--parallel.remat qkv,attn_out"),
        ("parallel.remat", "attn_ot:hst", "--parallel.remat attn_out:host"),
        ("parallel.remat", "dot", "--parallel.remat dots"),
        ("parallel.remat", "dots,qkv", "--parallel.remat '[qkv]'"),
        ("optimizer.schedule_by", "token", "--optimizer.schedule-by tokens"),
        ("data.mixture", "web,code:x,books:1:2", "--data.mixture web:1.0,code:1.0,books:1:2.0"),
        ("evaluation.sets", "web,a:b", "--evaluation.sets a:b"),
        ("parallel.auto", "dta,tensor", "--parallel.auto data,tensor"),
        ("parallel.layers_per_stage", "3;1", "--parallel.layers-per-stage ''"),
    ],
)
def test_the_fix_of_a_text_keeps_what_can_be_read(path, text, fix):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(Config(), [f"--{path}={text}"])
    assert caught.value.field == path and caught.value.fix == f"use {fix}"
    parse_overrides(Config(), options_in(fix))


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ("web:1", "data.mixture = 'web:1': must be a list of PATH:WEIGHT"),
        ([{"path": "web"}], r"data\.mixture\[0\]\.weight = None: is missing"),
        ([{"path": "web", "weight": 1, "most": 3}], r"mixture\[0\]\.most = 3: is not a field"),
        (["web:1"], r"data\.mixture\[0\] = 'web:1': must be a JSON object of fields"),
    ],
)
def test_a_saved_list_of_another_form_is_one_error(saved, said):
    with pytest.raises(ConfigError, match=said):
        check(from_json(json.dumps({"data": {"mixture": saved}})))
    assert value_text("data.mixture", saved)


def test_no_field_is_a_text_that_is_split():
    """A list is a tuple, whose items have types, ranges and errors."""
    names = {path.split(".")[-1] for path, hint in field_types().items() if str in members(hint)}
    splits = re.compile(rf"\.({'|'.join(names)})\.split\(")
    files = Path(jaxpar.__file__).parent.rglob("*.py")
    assert names and not [file for file in files if splits.search(file.read_text("utf8"))]
