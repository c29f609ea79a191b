"""Configs that cannot work are refused by field, value, rule and a fix that does work."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxpar import cli
from jaxpar.config import (
    Config,
    ConfigError,
    ModelConfig,
    RopeScaling,
    TrainConfig,
    default_of,
    field_types,
    from_json,
    leaf_paths,
    replace,
    to_json,
)
from jaxpar.model.flops import num_params
from jaxpar.validation import check, resolve

CONFIGS = sorted(path.stem for path in cli.CONFIGS.glob("*.py"))
NAN, INF = float("nan"), float("inf")

#: Fields changed in the default config; devices; the field at fault; a part of its rule.
BAD = [
    # what divides what
    ("model.num_heads=7", 1, "model.num_heads", "divisible by model.num_kv_heads = 4"),
    ("model.num_heads=6 parallel.tensor=4", 4, "model.num_heads", "num_kv_heads = 4"),
    (
        "model.num_heads=6 model.num_kv_heads=2 parallel.tensor=4",
        4,
        "model.num_heads",
        "divisible by parallel.tensor = 4",
    ),
    ("parallel.tensor=8", 8, "model.num_kv_heads", "divisible by parallel.tensor = 8"),
    ("model.num_kv_heads=8 parallel.tensor=3", 3, "model.num_heads", "parallel.tensor = 3"),
    ("model.d_ff=705 parallel.tensor=2", 2, "model.d_ff", "divisible by parallel.tensor = 2"),
    (
        "model.vocab_size=510 parallel.tensor=4",
        4,
        "model.vocab_size",
        "divisible by parallel.tensor = 4",
    ),
    (
        "model.vocab_size=514 parallel.tensor=2 parallel.pipeline=2",
        4,
        "model.vocab_size",
        "divisible by parallel.tensor * parallel.pipeline = 4",
    ),
    ("model.num_layers=5 parallel.pipeline=2", 2, "model.num_layers", "parallel.pipeline = 2"),
    (
        "model.num_layers=6 parallel.pipeline=2 parallel.virtual_stages=2",
        2,
        "model.num_layers",
        "divisible by parallel.pipeline * parallel.virtual_stages = 4",
    ),
    ("parallel.virtual_stages=2", 1, "parallel.virtual_stages", "parallel.pipeline is 1"),
    (
        "parallel.pipeline=2 parallel.virtual_stages=2 parallel.num_microbatches=5",
        2,
        "parallel.num_microbatches",
        "divisible by parallel.pipeline = 2",
    ),
    ("train.global_batch_size=7", 2, "train.global_batch_size", "parallel.data = 2"),
    (
        "train.global_batch_size=12 parallel.num_microbatches=2 parallel.replica=2",
        8,
        "train.global_batch_size",
        "parallel.replica * parallel.data * parallel.num_microbatches = 16",
    ),
    ("parallel.num_microbatches=5", 1, "train.global_batch_size", "num_microbatches = 5"),
    ("data.seq_len=1023 parallel.tensor=2", 2, "data.seq_len", "parallel.tensor = 2"),
    (
        "data.seq_len=1004 parallel.tensor=2 parallel.sequence=2",
        4,
        "data.seq_len",
        "divisible by 2 * parallel.sequence * parallel.tensor = 8, since in zigzag order",
    ),
    ("data.seq_len=1002 parallel.sequence=2 parallel.context=ring", 2, "data.seq_len", "zigzag"),
    (
        "data.seq_len=1001 parallel.sequence=2 parallel.context=ulysses",
        2,
        "data.seq_len",
        "divisible by parallel.sequence = 2",
    ),
    (
        "parallel.tensor=4 parallel.sequence=4 parallel.context=ulysses",
        16,
        "model.num_heads",
        "divisible by parallel.tensor * parallel.sequence = 16, since ulysses",
    ),
    ("model.d_model=255", 2, "model.d_model", "divisible by parallel.data = 2"),
    (
        "model.d_model=258 parallel.expert=2 parallel.sequence=2",
        8,
        "model.d_model",
        "parallel.data * parallel.expert * parallel.sequence = 8",
    ),
    # devices
    ("parallel.data=3", 4, "parallel.data", "multiply to 3, and there are 4 devices"),
    ("parallel.data=2 parallel.tensor=2", 8, "parallel.data", "multiply to 4"),
    ("parallel.data=2 parallel.replica=3", 8, "parallel.data", "multiply to 6"),
    ("parallel.tensor=3", 1, "parallel.tensor", "multiply to 3, which does not divide 1 device"),
    ("parallel.replica=3", 8, "parallel.replica", "which does not divide 8 devices"),
    ("parallel.replica=8 parallel.expert=4", 8, "parallel.expert", "multiply to 32"),
    ("parallel.expert=4 run.cpu_devices=2", 2, "parallel.expert", "multiply to 4"),
    ("parallel.data=0", 1, "parallel.data", "at least 1, or -1 for the devices that are left"),
    ("parallel.data=-2", 1, "parallel.data", "at least 1, or -1"),
    # counts
    ("train.num_steps=0", 1, "train.num_steps", "at least 1"),
    ("train.global_batch_size=-4", 1, "train.global_batch_size", "at least 1"),
    ("train.log_every=0", 1, "train.log_every", "at least 1"),
    ("data.prefetch=0", 1, "data.prefetch", "at least 1"),
    ("model.num_layers=0", 1, "model.num_layers", "at least 1"),
    ("model.num_kv_heads=0", 1, "model.num_kv_heads", "at least 1"),
    ("parallel.tensor=0", 1, "parallel.tensor", "at least 1"),
    ("parallel.num_microbatches=-1", 1, "parallel.num_microbatches", "at least 1"),
    ("checkpoint.keep=0", 1, "checkpoint.keep", "at least 1"),
    ("evaluation.num_batches=0", 1, "evaluation.num_batches", "at least 1"),
    ("train.seed=-1", 1, "train.seed", "not be negative"),
    ("train.seed=2147483648", 1, "train.seed", "at most 2147483647"),
    ("run.cpu_devices=-1", 1, "run.cpu_devices", "not be negative"),
    ("checkpoint.every=-1", 1, "checkpoint.every", "not be negative"),
    ("evaluation.every=-5", 1, "evaluation.every", "not be negative"),
    ("optimizer.warmup_steps=-1", 1, "optimizer.warmup_steps", "not be negative"),
    # rates
    ("optimizer.learning_rate=nan", 1, "optimizer.learning_rate", "finite"),
    ("optimizer.learning_rate=inf", 1, "optimizer.learning_rate", "finite"),
    ("optimizer.learning_rate=-3e-4", 1, "optimizer.learning_rate", "above 0"),
    ("optimizer.learning_rate=0", 1, "optimizer.learning_rate", "above 0"),
    ("optimizer.eps=0.0", 1, "optimizer.eps", "above 0"),
    ("optimizer.weight_decay=-0.1", 1, "optimizer.weight_decay", "not be negative"),
    ("optimizer.clip_norm=nan", 1, "optimizer.clip_norm", "finite"),
    ("optimizer.clip_norm=-1", 1, "optimizer.clip_norm", "not be negative"),
    ("optimizer.beta1=1.0", 1, "optimizer.beta1", "below 1"),
    ("optimizer.beta2=-0.1", 1, "optimizer.beta2", "below 1"),
    ("optimizer.beta2=nan", 1, "optimizer.beta2", "finite"),
    ("optimizer.min_lr_ratio=1.5", 1, "optimizer.min_lr_ratio", "at most 1"),
    ("optimizer.min_lr_ratio=nan", 1, "optimizer.min_lr_ratio", "finite"),
    ("train.z_loss=-inf", 1, "train.z_loss", "finite"),
    ("model.norm_eps=0", 1, "model.norm_eps", "above 0"),
    ("model.rope_theta=-1", 1, "model.rope_theta", "above 0"),
    ("model.init_std=nan", 1, "model.init_std", "finite"),
    ("train.num_steps=100", 1, "optimizer.warmup_steps", "below train.num_steps = 100"),
    ("train.num_steps=5 optimizer.warmup_steps=7", 1, "optimizer.warmup_steps", "below"),
    # the model
    ("model.head_dim=31", 1, "model.head_dim", "even"),
    ("model.sliding_window=0", 1, "model.sliding_window", "at least 1, or None"),
    ("model.attention_backend=cudnn model.head_dim=36", 1, "model.head_dim", "multiple of 8"),
    ("model.attention_backend=cudnn model.head_dim=264", 1, "model.head_dim", "up to 256"),
    (
        "model.attention_backend=cudnn model.dtype=float32",
        1,
        "model.attention_backend",
        "bfloat16 only",
    ),
    (
        "model.attention_backend=cudnn parallel.sequence=2",
        2,
        "model.attention_backend",
        "the text's own order",
    ),
    ("model.rope_scaling.factor=0.5", 1, "model.rope_scaling.factor", "at least 1"),
    ("model.rope_scaling.factor=inf", 1, "model.rope_scaling.factor", "finite"),
    (
        "model.rope_scaling.low_freq_factor=4",
        1,
        "model.rope_scaling.low_freq_factor",
        "below high_freq_factor = 4.0",
    ),
    (
        "model.rope_scaling.low_freq_factor=0",
        1,
        "model.rope_scaling.low_freq_factor",
        "above 0",
    ),
    (
        "model.rope_scaling.original_max_position=0",
        1,
        "model.rope_scaling.original_max_position",
        "at least 1",
    ),
    # the rest
    ("parallel.remat=everything", 1, "parallel.remat", "one of none, dots, attn_out, full"),
    ("parallel.remat=qkv,atn_out", 1, "parallel.remat", "names joined by commas from attn_norm"),
    ("parallel.remat=dots,qkv", 1, "parallel.remat", "one of none, dots"),
    ("parallel.remat=", 1, "parallel.remat", "one of none, dots"),
    ("checkpoint.keep_every=750", 1, "checkpoint.keep_every", "multiple of checkpoint.every = 500"),
    (
        "checkpoint.keep_every=750 checkpoint.every=0",
        1,
        "checkpoint.keep_every",
        "checkpoint.every is 0",
    ),
    (
        "checkpoint.resume=must checkpoint.every=0",
        1,
        "checkpoint.resume",
        "needs checkpoints, and checkpoint.every is 0",
    ),
    ("run.dir=", 1, "run.dir", "must name a folder"),
    ("data.path=", 1, "data.path", "must name a folder"),
]


def changed(text: str) -> Config:
    """The default config with `section.field=value ...`, on the way that the command line takes."""
    return cli.parse_overrides(Config(), ["--" + item for item in text.split()], "test")


def fixes(error: ConfigError) -> list[list[str]]:
    """The alternatives of a fix, each as command-line arguments."""
    ways = [re.findall(r"--[\w.-]+ [^\s,]\S*", way) for way in error.fix.split(", or ")]
    return [[word for setting in way for word in setting.split(" ", 1)] for way in ways]


@pytest.mark.parametrize(("text", "devices", "field", "rule"), BAD, ids=[row[0] for row in BAD])
def test_a_bad_config_is_refused_and_every_fix_works(text, devices, field, rule):
    cfg = changed(text)
    with pytest.raises(ConfigError) as caught:
        resolve(cfg, devices)
    error = caught.value
    assert error.field == field
    assert rule in error.rule
    assert str(error).startswith(f"{field} = {error.value!r}: ")
    assert "\n" not in str(error)
    ways = fixes(error)
    assert ways and all(ways), f"names no setting: {error.fix}"
    for way in ways:
        fixed = cli.parse_overrides(cfg, way, "test")
        resolve(fixed, fixed.run.cpu_devices or devices)
