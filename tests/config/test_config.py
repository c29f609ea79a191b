"""Configs that cannot work are refused by field, value, rule and a fix that does work."""

import dataclasses
import json
import os
import re
import shlex
import typing

import pytest

from jaxpar.config import (
    ComputeConfig,
    Config,
    ConfigError,
    Rope,
    RopeScaling,
    Source,
    command_line,
    config_file,
    default_of,
    replace,
)
from jaxpar.config.errors import shown
from jaxpar.config.explain import errors_of
from jaxpar.config.fields import field_types, leaf_paths
from jaxpar.config.serialize import from_json, to_json
from jaxpar.config.validate import check, resolve
from tests.config.models import BASE

ROPE = "model.layers.mixer.rope"
CONFIGS = config_file.known_configs().split(", ")

#: Fields changed in `BASE` | devices | the field at fault | a part of its rule.
BAD_CONFIGS = """
# what divides what
MIXER.num_heads=7 | 1 | MIXER.num_heads | divisible by num_kv_heads = 4
MIXER.num_heads=6 parallel.tensor=4 | 4 | MIXER.num_heads | num_kv_heads = 4
parallel.tensor=8 | 8 | MIXER.num_kv_heads | divisible by parallel.tensor = 8
MIXER.num_heads=12 MIXER.num_kv_heads=2 parallel.tensor=4 | 4 | \
    MIXER.num_kv_heads | parallel.tensor = 4
FORWARD.d_ff=705 parallel.tensor=2 | 2 | FORWARD.d_ff | divisible by parallel.tensor = 2
model.vocab_size=510 parallel.tensor=4 | 4 | model.vocab_size | parallel.tensor = 4
model.vocab_size=514 parallel.tensor=2 parallel.pipeline=2 | 4 | \
    model.vocab_size | parallel.tensor * parallel.pipeline = 4
model.num_layers=1 parallel.pipeline=2 | 2 | model.num_layers | at least 2: 1 layer for each of 2
model.num_layers=3 parallel.pipeline=2 parallel.virtual_stages=2 parallel.num_microbatches=2 | 2 | \
    model.num_layers | for each of 4 virtual stages
parallel.pipeline=2 parallel.layers_per_stage=-3,7 | 2 | \
    parallel.layers_per_stage[0] | must be at least 1
parallel.pipeline=2 parallel.layers_per_stage=1,1,2 | 2 | parallel.layers_per_stage | but has 3
parallel.layers_per_stage=3,1 | 1 | parallel.layers_per_stage | each of 1 stages, but has 2
parallel.pipeline=2 parallel.layers_per_stage=4,0 | 2 | \
    parallel.layers_per_stage[1] | must be at least 1
parallel.pipeline=2 parallel.layers_per_stage=3,2 | 2 | \
    parallel.layers_per_stage | add up to model.num_layers = 4, not to 5
parallel.pipeline=2 parallel.virtual_stages=2 parallel.num_microbatches=2 \
    parallel.layers_per_stage=2,2 | 2 | parallel.layers_per_stage | 4 virtual stages, but has 2
parallel.virtual_stages=2 | 1 | parallel.virtual_stages | parallel.pipeline is 1
parallel.pipeline=2 parallel.virtual_stages=2 parallel.num_microbatches=2 \
    parallel.schedule=gpipe | 2 | parallel.virtual_stages | with parallel.schedule = gpipe
parallel.pipeline=2 parallel.virtual_stages=2 parallel.num_microbatches=1 | 2 | \
    parallel.num_microbatches | rounds
ZB parallel.virtual_stages=2 parallel.num_microbatches=2 | 2 | \
    parallel.num_microbatches | at least 3
ZB parallel.num_microbatches=2 | 2 | parallel.num_microbatches | at least 3, 2 *
ZB train.micro_batch_size=16 | 2 | parallel.num_microbatches | at least 3
ZB4 parallel.zero=2 | 2 | parallel.zero | zero_bubble
ZB4 parallel.sequence=2 | 4 | parallel.sequence | zero_bubble
ZB4 parallel.layer_loop=scan | 2 | parallel.layer_loop | zero_bubble
ZB4 compute.matmul_dtype=float8 | 2 | compute.matmul_dtype | zero_bubble
ZB4 lora.rank=4 | 2 | lora.rank | zero_bubble
parallel.replica_reduction=int8 | 2 | parallel.replica | at least 2 with
RED=top_k parallel.replica_top_k=0.7 | 2 | parallel.replica_top_k | must be below 0.667 with 2
RED=top_k parallel.replica_top_k=0.0 | 2 | parallel.replica_top_k | above 0
train.global_batch_size=7 | 2 | train.global_batch_size | parallel.data = 2
train.global_batch_size=12 parallel.num_microbatches=2 parallel.replica=2 | 8 | \
    train.global_batch_size | parallel.data * parallel.num_microbatches = 16
train.micro_batch_size=3 | 2 | train.micro_batch_size | divide the 16 sequences that each of 2
train.micro_batch_size=-1 | 1 | train.micro_batch_size | not be negative
train.micro_batch_size=4 parallel.num_microbatches=2 | 2 | parallel.num_microbatches | from the 4
train.micro_batch_size=16 parallel.pipeline=2 parallel.virtual_stages=2 | 4 | \
    train.micro_batch_size | rounds of 2
train.global_batch_size=7 train.micro_batch_size=1 | 2 | train.global_batch_size | data = 2
parallel.num_microbatches=5 | 1 | train.global_batch_size | num_microbatches = 5
data.seq_len=1023 parallel.tensor=2 | 2 | data.seq_len | parallel.tensor = 2
data.seq_len=1004 parallel.tensor=2 parallel.sequence=2 | 4 | \
    data.seq_len | 2 * parallel.sequence * parallel.tensor = 8
data.seq_len=1002 parallel.sequence=2 parallel.context=ring | 2 | data.seq_len | zigzag
data.seq_len=1001 parallel.sequence=2 parallel.context=ulysses | 2 | \
    data.seq_len | parallel.sequence = 2
parallel.tensor=4 parallel.sequence=4 parallel.context=ulysses | 16 | \
    MIXER.num_heads | = 16, for ulysses
model.d_model=4096 train.global_batch_size=48 | 24 | model.d_model | parallel.data = 24
model.d_model=255 | 2 | model.d_model | divisible by parallel.data = 2
model.d_model=258 parallel.expert=2 parallel.sequence=2 | 8 | \
    model.d_model | parallel.expert * parallel.sequence = 8
# devices
parallel.data=3 | 4 | parallel.data | multiply to 3, but there are 4 devices
parallel.data=2 parallel.tensor=2 | 8 | parallel.data | multiply to 4
parallel.data=2 parallel.replica=3 | 8 | parallel.data | multiply to 6
parallel.tensor=2 | 1 | parallel.tensor | the mesh needs 2 devices, but there is 1 device
parallel.replica=3 | 8 | parallel.replica | which does not divide 8 devices
parallel.replica=8 parallel.expert=4 | 8 | parallel.expert | the mesh needs 32 devices
parallel.expert=4 run.cpu_devices=2 | 2 | parallel.expert | the mesh needs 4 devices
parallel.data=0 | 1 | parallel.data | at least 1, or -1 for all remaining devices
parallel.data=-2 | 1 | parallel.data | at least 1, or -1
# counts
train.num_steps=99999999999999999999 | 1 | train.num_steps | at most 2,147,483,647
run.cpu_devices=100000 | 1 | run.cpu_devices | at most 4,096
train.num_steps=0 | 1 | train.num_steps | at least 1
train.global_batch_size=-4 | 1 | train.global_batch_size | at least 1
train.log_every=0 | 1 | train.log_every | at least 1
data.prefetch=0 | 1 | data.prefetch | at least 1
MIXER.num_kv_heads=0 | 1 | MIXER.num_kv_heads | at least 1
parallel.tensor=0 | 1 | parallel.tensor | at least 1
parallel.num_microbatches=-1 | 1 | parallel.num_microbatches | at least 1
checkpoint.keep=0 | 1 | checkpoint.keep | at least 1
evaluation.num_batches=0 | 1 | evaluation.num_batches | at least 1
train.seed=-1 | 1 | train.seed | not be negative
train.seed=2147483648 | 1 | train.seed | at most 2,147,483,647
run.cpu_devices=-1 | 1 | run.cpu_devices | not be negative
checkpoint.every=-1 | 1 | checkpoint.every | not be negative
evaluation.every=-5 | 1 | evaluation.every | not be negative
optimizer.warmup_steps=-1 | 1 | optimizer.warmup_steps | not be negative
profile.start=-1 | 1 | profile.start | not be negative
profile.num_steps=0 | 1 | profile.num_steps | at least 1
profile.num_steps=401 | 1 | profile.num_steps | at most 400: 20 profiles of 20 steps
profile.every=5 | 1 | profile.every | repeats the profile of profile.start, which is 0
profile.start=3 profile.every=2 | 1 | profile.every | more than profile.num_steps = 2
profile.every=-1 | 1 | profile.every | must not be negative
train.num_steps=200 profile.start=201 | 1 | profile.start | a step of the run
# rates
optimizer.learning_rate=nan | 1 | optimizer.learning_rate | finite
optimizer.learning_rate=inf | 1 | optimizer.learning_rate | finite
optimizer.learning_rate=-3e-4 | 1 | optimizer.learning_rate | above 0
optimizer.learning_rate=0 | 1 | optimizer.learning_rate | above 0
optimizer.eps=0.0 | 1 | optimizer.eps | above 0
optimizer.weight_decay=-0.1 | 1 | optimizer.weight_decay | not be negative
optimizer.clip_norm=nan | 1 | optimizer.clip_norm | finite
optimizer.clip_norm=-1 | 1 | optimizer.clip_norm | not be negative
optimizer.beta1=1.0 | 1 | optimizer.beta1 | below 1
optimizer.beta2=-0.1 | 1 | optimizer.beta2 | below 1
optimizer.beta2=nan | 1 | optimizer.beta2 | finite
optimizer.min_lr_ratio=1.5 | 1 | optimizer.min_lr_ratio | must be from 0 to 1
optimizer.min_lr_ratio=nan | 1 | optimizer.min_lr_ratio | finite
train.z_loss=-inf | 1 | train.z_loss | finite
model.norm.eps=0 | 1 | model.norm.eps | above 0
MIXER.rope.theta=-1 | 1 | MIXER.rope.theta | above 0
model.init_std=nan | 1 | model.init_std | finite
optimizer.warmup_fraction=1.0 | 1 | optimizer.warmup_fraction | at least 0 and below 1
optimizer.decay_steps=-1 | 1 | optimizer.decay_steps | not be negative
optimizer.decay_steps=5 optimizer.schedule=constant | 1 | optimizer.decay_steps | has no effect
optimizer.decay_steps=1001 optimizer.schedule=wsd | 1 | optimizer.decay_steps | at most train.num
# the model
MIXER.head_dim=31 | 1 | MIXER.head_dim | even
MIXER.window=0 | 1 | MIXER.window | at least 2
MIXER.window=1 | 1 | MIXER.window | at least 2
MIXER.window=3000000000 | 1 | MIXER.window | at most 2,147,483,647
MIXER.rope.theta=inf | 1 | MIXER.rope.theta | finite
data.eos_id=3000000000 | 1 | data.eos_id | at most 2,147,483,647
compute.attention_backend=cudnn MIXER.head_dim=36 | 1 | MIXER.head_dim | multiple of 8
compute.attention_backend=cudnn MIXER.head_dim=264 | 1 | MIXER.head_dim | up to 256
compute.attention_backend=cudnn compute.dtype=float32 | 1 | \
    compute.attention_backend | not supported with compute.dtype = float32
compute.attention_backend=pallas_hopper MIXER.head_dim=72 | 1 | MIXER.head_dim | 64, 128 or 256
compute.attention_backend=pallas_hopper MIXER.head_dim=512 | 1 | MIXER.head_dim | 64, 128 or 256
compute.attention_backend=pallas_hopper MIXER.head_dim=64 compute.dtype=float32 | 1 | \
    compute.attention_backend | not supported with compute.dtype = float32
compute.attention_backend=cudnn parallel.sequence=2 | 2 | \
    compute.attention_backend | it needs tokens in order
MIXER.rope.scaling.factor=0.5 | 1 | MIXER.rope.scaling.factor | at least 1
MIXER.rope.scaling.factor=inf | 1 | MIXER.rope.scaling.factor | finite
MIXER.rope.scaling.low_freq_factor=5 | 1 | \
    MIXER.rope.scaling.low_freq_factor | at most high_freq_factor = 4.0
MIXER.rope.scaling.low_freq_factor=0 | 1 | MIXER.rope.scaling.low_freq_factor | above 0
MIXER.rope.scaling.original_max_position=0 | 1 | \
    MIXER.rope.scaling.original_max_position | at least 1
# the rest
parallel.remat= | 1 | parallel.remat | must be a policy, or name values
parallel.remat=qkv,moe_tokens | 1 | parallel.remat | which only experts have
parallel.remat=[layer_input] | 1 | parallel.remat | always saves layer_input
parallel.layer_loop=unroll parallel.remat_layers=full,[qk,qk:host]::2 | 1 | \
    parallel.remat_layers[1].policy | name each value once
parallel.layer_loop=unroll parallel.remat_layers=full:::0 | 1 | \
    parallel.remat_layers[0].step | at least 1
parallel.layer_loop=scan parallel.remat_layers=full:::2 | 1 | \
     parallel.remat_layers | a scan has one policy
parallel.remat_group=3 | 1 | parallel.remat_group | must divide
parallel.remat_group=2 parallel.layer_loop=unroll | 1 | \
    parallel.remat_group | it groups layers of a scan
parallel.remat_group=2 parallel.remat=dots_offload | 1 | parallel.remat_group | host memory
parallel.remat=attn_out,attn_out:host | 1 | parallel.remat | name each value once
optimizer.name=lion optimizer.second_moment_dtype=bfloat16 | 1 | \
    optimizer.second_moment_dtype | lion has no second moment
optimizer.second_moment_dtype=bfloat16 optimizer.beta2=0.9999 | 1 | \
    optimizer.second_moment_dtype | needs optimizer.beta2 <= 0.999
optimizer.first_moment_dtype=bfloat16 optimizer.beta1=0.9995 | 1 | \
    optimizer.first_moment_dtype | needs optimizer.beta1 <= 0.999
optimizer.name=lion optimizer.first_moment_dtype=bfloat16 optimizer.beta2=0.9999 | 1 | \
    optimizer.first_moment_dtype | needs optimizer.beta2 <= 0.999
checkpoint.keep_every=750 | 1 | checkpoint.keep_every | multiple of checkpoint.every = 500
checkpoint.keep_every=750 checkpoint.every=0 | 1 | checkpoint.keep_every | checkpoint.every is 0
checkpoint.resume=must checkpoint.every=0 | 1 | \
    checkpoint.resume | needs checkpoints, but checkpoint.every is 0
run.dir= | 1 | run.dir | must name a folder
data.path= | 1 | data.path | must name a folder
data.mixture=web:1,:2 | 1 | data.mixture[1].path | must not be empty
data.mixture=web:1,code:0 | 1 | data.mixture[1].weight | must be above 0
data.mixture=web:nan | 1 | data.mixture[0].weight | must be finite
data.mixture=web:1,code:2,web:3 | 1 | data.mixture | has the path web twice
data.eos_id=-1 | 1 | data.eos_id | must not be negative
metrics.wandb=a/b/c | 1 | metrics.wandb | must be PROJECT or ENTITY/PROJECT
metrics.prometheus_port=65536 | 1 | metrics.prometheus_port | must be at most 65,535
metrics.layers=cheap optimizer.offload_masters=true optimizer.offload=true \
    parallel.layer_loop=scan | 1 | metrics.layers | not supported with optimizer.offload_masters
metrics.layers=all lora.rank=4 | 1 | metrics.layers | not supported with lora.rank
metrics.prometheus_address=everywhere | 1 | metrics.prometheus_address | an IP address
"""
ZERO_BUBBLE = "parallel.pipeline=2 parallel.schedule=zero_bubble parallel.layer_loop=unroll"
BAD_CONFIGS = BAD_CONFIGS.replace("MIXER", "model.layers.mixer")
BAD_CONFIGS = BAD_CONFIGS.replace("FORWARD", "model.layers.feed_forward")
BAD_CONFIGS = re.sub(r"^ZB4", "ZB parallel.num_microbatches=4", BAD_CONFIGS, flags=re.MULTILINE)
BAD_CONFIGS = BAD_CONFIGS.replace("RED=", "parallel.replica=2 parallel.replica_reduction=")
BAD_CONFIGS = re.sub(r"^ZB", f"{ZERO_BUBBLE} parallel.zero=1", BAD_CONFIGS, flags=re.MULTILINE)

BAD = [re.split(r" \| +", line) for line in BAD_CONFIGS.splitlines() if "|" in line]


def changed(text: str) -> Config:
    """`BASE` with `section.field=value ...`, on the way that the command line takes."""
    return command_line.parse_overrides(BASE, ["--" + item for item in text.split()])


def fixes(error: ConfigError) -> list[list[str]]:
    """The alternatives of a fix, each as command-line arguments."""
    ways = [re.findall(r"--[\w.-]+ [^\s,]\S*", way) for way in error.fix.split(", or ")]
    return [[word for setting in way for word in shlex.split(setting)] for way in ways]


@pytest.mark.parametrize(("text", "devices", "field", "rule"), BAD, ids=[row[0] for row in BAD])
def test_a_bad_config_is_refused_and_every_fix_works(text, devices, field, rule):
    cfg = changed(text)
    with pytest.raises(ConfigError) as caught:
        resolve(cfg, int(devices))
    errors = errors_of(caught.value)
    (error,) = (one for one in errors if one.field == field and rule in one.rule)
    assert str(error).startswith(f"{field} = {shown(error.value)}: ")
    assert str(caught.value).count("\n") == len(errors) * (len(errors) > 1)
    ways = fixes(error)
    assert ways and all(ways), f"names no setting: {error.fix}"
    for way in ways:
        broken = broken_rules(command_line.parse_overrides(cfg, way), int(devices))
        assert (error.field, error.rule) not in broken and len(broken) < len(errors), way


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "must be at least 1, for the layers layers x 4. Fix: use --model.num-layers 1."),
        (-1, "must be at least 1, for the layers layers x 4. Fix: use --model.num-layers 4."),
        (10**9, "must be at most 10,000. Fix: use --model.num-layers 4."),
    ],
)
def test_a_number_of_layers_that_cannot_be_is_refused(number, said):
    with pytest.raises(ConfigError) as caught:
        replace(BASE, **{"model.num_layers": number})
    assert str(caught.value) == f"model.num_layers = {number}: {said}"


def broken_rules(cfg: Config, devices: int) -> list[tuple[str, str]]:
    """Field and rule of all that is wrong with a config on so many devices."""
    try:
        resolve(cfg, cfg.run.cpu_devices or devices)
    except ConfigError as error:
        return [(one.field, one.rule) for one in errors_of(error)]
    return []


@pytest.mark.parametrize("path", ["run.dir", "run.init_from", "data.path", "data.held_out"])
@pytest.mark.parametrize("value", ["a/" + 128 * "é", "a" + 2048 * "/a", "a\0b"])
def test_a_path_that_no_system_takes_is_refused(path, value):
    with pytest.raises(ConfigError, match=r"255 per name") as caught:
        check(replace(Config(), **{path: value}))
    assert caught.value.field == path
    check(replace(Config(), **{path: "a/" + 127 * "é" + 1900 * "/a"}))
    with pytest.raises(ConfigError, match=r"data\.mixture\[1\]\.path = .* 255 per name"):
        check(replace(Config(), **{"data.mixture": (Source("web", 1), Source(value, 2))}))


UNKNOWN = [
    ("model.num_layer", "use model.num_layers"),
    ("num_layers", "use model.num_layers"),
    ("train.seq_len", "use data.seq_len"),
    ("every", "use checkpoint.every or evaluation.every"),
    ("trian.num_steps", "use train.num_steps"),
    ("model.mup.base_widht", "use model.mup.base_width"),
    ("lora_rank", "use lora.rank"),
    ("checkpoint.memory_every", "use checkpoint.memory.every"),
    ("data.xyz", "use one of data."),
    ("xyz", "use SECTION.FIELD, with a section of run, train, data, model, compute, lora"),
    ("train.num_steps.xyz", "use train.num_steps"),
    ("", "use SECTION.FIELD"),
    *((f"model.{f.name}", f"use compute.{f.name}") for f in dataclasses.fields(ComputeConfig)),
]


@pytest.mark.parametrize(("path", "fix"), UNKNOWN)
def test_an_unknown_field_is_refused_with_what_was_meant(path, fix):
    with pytest.raises(ConfigError, match="is not a field of the config") as caught:
        replace(Config(), **{path: 3})
    assert (caught.value.field, caught.value.value) == (path, 3)
    assert caught.value.fix.startswith(fix)


def test_an_unknown_field_in_json_is_refused_with_what_was_meant():
    saved = json.loads(to_json(Config()))
    saved["model"]["vocab_sise"] = 3
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(saved))
    fix = "remove it, or use model.vocab_size"
    assert str(caught.value) == f"model.vocab_sise = 3: is not a field of the config. Fix: {fix}."
    with pytest.raises(ConfigError, match=r"^extra = \{\}: is not a field"):
        from_json('{"extra": {}}')
    with pytest.raises(ConfigError, match=r"^model.mup.x = 1: is not a field"):
        from_json('{"model": {"mup": {"x": 1}}}')


@pytest.mark.parametrize("text", ["5", "[]", '{"train": 5}', '{"model": null}'])
def test_json_without_sections_is_refused(text):
    with pytest.raises(ConfigError, match="must be a JSON object of fields"):
        from_json(text)


@pytest.mark.parametrize("name", CONFIGS)
def test_json_brings_every_config_back(name):
    cfg = command_line.load_config(name)
    read = from_json(to_json(cfg))
    assert to_json(read) == to_json(cfg)
    if ".py:" not in to_json(cfg):  # without code, which is not read with it (tests/extend)
        assert read == cfg
    plain = replace(cfg, **{"model.mup": None})
    assert to_json(from_json(to_json(plain))) == to_json(plain)


def test_json_brings_optional_sections_back():
    scaled = replace(BASE, **{ROPE: Rope(scaling=RopeScaling(factor=3.0, low_freq_factor=2.0))})
    scaled = replace(scaled, **{"model.mup.base_width": 64})
    assert from_json(to_json(scaled)) == scaled != BASE == from_json(to_json(BASE))


def test_fields_that_json_leaves_out_have_their_defaults():
    assert from_json("{}") == Config()
    only = replace(Config(), **{"train.seed": 7})
    assert from_json('{"train": {"seed": 7}}') == only


def test_replace_leaves_the_rest_alone():
    cfg = replace(BASE, **{"model.num_layers": 2, "train.seed": 5})
    assert (cfg.model.num_layers, cfg.train.seed) == (2, 5)
    back = replace(cfg, **{"model": BASE.model, "train.seed": 0})
    assert back == BASE
    scaled = replace(cfg, **{f"{ROPE}.scaling.factor": 2.0})
    assert scaled.model.layers[1].mixer.rope == Rope(scaling=RopeScaling(factor=2.0))
    assert cfg.model.layers[1].mixer.rope == Rope()


def test_every_field_has_a_default():
    for path in leaf_paths():
        assert default_of(path) is not None or type(None) in typing.get_args(field_types()[path])


@pytest.mark.parametrize(
    ("fields", "devices", "zero"),
    [
        ({}, 1, 1),
        ({"parallel.tensor": 2, "parallel.replica": 2}, 4, 1),
        ({"parallel.tensor": 2}, 4, 3),
        ({"parallel.sequence": 4}, 4, 3),
        ({"compute.matmul_dtype": "float8", "parallel.gather_dtype": "float8"}, 1, 3),
    ],
)
def test_where_nothing_is_sharded_weights_are_cast_once(fields, devices, zero):
    cfg = replace(Config(), **{"train.global_batch_size": 16}, **fields)
    assert cfg.parallel.zero == 3 and resolve(cfg, devices).parallel.zero == zero


def test_the_data_axis_takes_the_devices_that_are_left():
    cfg = replace(Config(), **{"parallel.tensor": 2, "parallel.replica": 2})
    assert resolve(cfg, 16).parallel.data == 4
    assert resolve(resolve(cfg, 16), 16) == resolve(cfg, 16)
    with pytest.raises(ConfigError, match="there are 8 devices"):
        resolve(resolve(cfg, 16), 8)


def test_numbers_of_devices_do_not_matter_to_what_can_be_checked_before():
    check(replace(Config(), **{"parallel.tensor": 4, "parallel.data": 32}))
    with pytest.raises(ConfigError, match=r"num_microbatches = 5, since"):
        check(replace(Config(), **{"parallel.num_microbatches": 5}))


def test_a_file_rewritten_in_the_same_second_is_read_anew(tmp_path):
    file = tmp_path / "mine.py"
    text = "from jaxpar import load_config, replace\n\n\ndef get_config():\n"
    text += "    return replace(load_config('quickstart'), **{'optimizer.learning_rate': 1e-2})\n"
    for rate in (1e-2, 2e-2):
        file.write_text(text.replace("1e-2", f"{rate:.0e}".replace("e-0", "e-")))
        os.utime(file, (1_000_000_000, 1_000_000_000))
        assert command_line.load_config(str(file)).optimizer.learning_rate == rate
