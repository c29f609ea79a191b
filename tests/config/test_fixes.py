"""Whoever follows the first fix of each message comes to a legal config, and never in a circle."""

import dataclasses
import functools
import itertools
import random
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType

import pytest

from jaxpar.config import Config, ConfigError, Source, default_of, flag, replace, value_of
from jaxpar.config.command_line import parse_overrides, read_config
from jaxpar.config.config_file import known_configs, load_config
from jaxpar.config.explain import errors_of, fixes_of, options_in, same_rule
from jaxpar.config.fields import field_types, leaf_paths
from jaxpar.config.layers import BESIDE, addressed, all_paths, type_at
from jaxpar.config.listed import item_of, members, written
from jaxpar.config.validate import check, resolve
from jaxpar.prediction.hardware import gpu_named
from tests.config.models import BASE, DELTA, EXPERTS, LAYER, OF_EXPERTS, lists_of, setting

#: Most fixes to follow. Fields that a feature alone reads are refused one by one.
MOST = 16

#: Sections whose fields depend on one another.
SECTIONS = ("model", "lora", "dpo", "distill", "train", "optimizer", "parallel", "data", "diloco")


def follow(cfg: Config, legal=check) -> list[str]:
    """Follow first fixes up to a legal config; the messages on the way."""
    seen, messages = [], []
    while True:
        try:
            legal(cfg)
            return messages
        except ConfigError as error:
            messages.append(str(error))
            first = error.fix.removeprefix("use ").split(", or ")[0]
        seen.append(cfg)
        cfg = parse_overrides(cfg, shlex.split(first))
        assert cfg not in seen, "a circle: " + "\n".join(messages)
        assert len(seen) < MOST, "no end: " + "\n".join(messages)


FIRST = dataclasses.replace(LAYER, name="dense_layers")
SCALING = "model.layers.mixer.rope.scaling"

CASES = {
    "adapters and modules": ("llama_1b_lora_chat", {"model.mtp_depth": 1}),
    "adapters on no projection": ("llama_1b", {"lora.rank": 4, "lora.targets": ("x",)}),
    "adapters on a name without letters": ("llama_1b", {"lora.rank": 4, "lora.targets": ("", "")}),
    "adapters on experts": ("deepseek_v2_lite", {"lora.rank": 4, "lora.targets": ("gate_proj",)}),
    "adapters on what is not there": (
        "kimi_k2",
        {"lora.rank": 4, "lora.targets": ("x", "down_proj")},
    ),
    "modules with a recurrence": ("", {"model.layers": [LAYER, DELTA], "model.mtp_depth": 1}),
    "no path": ("quickstart", {"data.path": ""}),
    "experts of Llama 4": (
        "llama4_scout",
        {"lora.rank": 4, "train.balance_loss": 0.1, "optimizer.qk_clip": 50.0},
    ),
    "a feature's fields alone": (
        "quickstart",
        {"data.length_keeps": "sequences", "train.mtp_loss": 0.3},
    ),
    "DiLoCo of experts": ("kimi_k2", {"diloco.overlap": 1, "diloco.every": 20}),
    "experts by a pattern": ("nemotron_3_nano", {"diloco.every": 1}),
    "experts between, in stages": (
        "",
        {"model.layers": [FIRST, OF_EXPERTS] * 2, "parallel.pipeline": 3, "lora.rank": 2000},
    ),
    "two kinds of scaling": (
        "llama3_70b",
        {f"{SCALING}.beta_fast": 8.0, f"{SCALING}.low_freq_factor": 2.0},
    ),
    "a bound that another kind reads": (
        "gpt_oss_120b",
        {"model.global_layers.mixer.rope.scaling.high_freq_factor": 0.1},
    ),
    "a number for each pair of dims, and no pairs": (
        "phi_4_mini",
        {"model.layers.mixer.head_dim": 2},
    ),
    "a number for each pair, and half a pair": ("phi_4_mini", {"model.layers.mixer.head_dim": 3}),
    "yarn with a factor of another kind": (
        "",
        {f"{SCALING}.kind": "yarn", f"{SCALING}.low_freq_factor": 2.0},
    ),
    "heads of latent attention": ("moonlight_16b_a3b", {"parallel.tensor": 3}),
    "groups of another number of experts": (
        "",
        {"model.layers.feed_forward": EXPERTS, "model.layers.feed_forward.router.groups": 3},
    ),
    "a norm that is not there": (
        "quickstart",
        {"model.layers.norms": "after", "model.layers.parallel": "one_norm"},
    ),
    "two factors of scores": (
        "gemma_3/1b",
        {"model.layers.mixer.scale": 0.1, "model.layers.mixer.chunk": 8},
    ),
    "a router without a gradient": (
        "quickstart_moe",
        {"model.layers.feed_forward.experts_per_token": 1, "train.router_bias_rate": 0.0},
    ),
}


def config_of(name: str) -> Config:
    """A shipped config, or `BASE`."""
    return load_config(name) if name else BASE


@pytest.mark.parametrize("case", CASES)
def test_first_fixes_end(case):
    name, fields = CASES[case]
    assert follow(replace(config_of(name), **fields))


def test_first_fixes_end_for_a_recurrent_last_layer():
    cfg = load_config("qwen3_next_80b_a3b")
    layers = (*cfg.model.layers[3:], *cfg.model.layers[:3])
    model = dataclasses.replace(cfg.model.with_layers(layers), mtp_depth=1)
    assert follow(dataclasses.replace(cfg, model=model))


def test_a_mixture_needs_no_path_beside_it():
    check(replace(BASE, **{"data.path": "", "data.mixture": (Source("a", 1.0), Source("b", 2.0))}))


def test_advice_for_targets_is_not_refused_in_turn():
    """Advice that only names what may be adapted ends with one message."""
    for name in ("deepseek_v2_lite", "kimi_k2", "qwen3_next_80b_a3b"):
        fields = {"lora.rank": 4, "lora.targets": ("q_prj", "gate_prj"), "train.balance_loss": 0.0}
        messages = follow(replace(load_config(name), **fields))
        assert len([message for message in messages if "lora.targets" in message]) == 1


@pytest.mark.parametrize("devices", [2, 3, 5, 6, 7, 8, 12])
def test_a_number_of_devices_asks_for_no_other_model(devices):
    """128 is a width; 129 is what nobody would take."""
    cfg = load_config("quickstart")
    for message in follow(cfg, lambda cfg: resolve(cfg, devices)):
        assert "--model." not in message


def values_of(path: str, cfg: Config) -> list:
    """Values of a field: of the config, its default, and a few of its type."""
    is_flag = path in field_types()
    hint = field_types()[path] if is_flag else type_at(cfg.model.layers, path)
    usual = {bool: [False, True], int: [0, 1, 2, 3, 8], float: [0.0, 0.1, 1.0], NoneType: [None]}
    found = [default_of(path)] if is_flag else []
    if (item := item_of(hint)) is not None:
        found += [(), *lists_of(item)]
    for one in members(hint):
        found += [one] if isinstance(one, str) else usual.get(one, [])
    if is_flag:
        found += [value_of(cfg, path)] if value_of(cfg, path.rpartition(".")[0]) else []
    else:
        found += [value for _, value in addressed(cfg.model.layers, path.split(".")[1:])]
    return sorted(set(found), key=repr)


def paths_of(cfg: Config, sections: Sequence[str]) -> list[str]:
    """The fields of sections, those of layers by their addresses."""
    found = [path for path in leaf_paths() if path.partition(".")[0] in sections]
    found = [one for one in found if not one.startswith("model.") or one.split(".")[1] in BESIDE]
    return [*found, *all_paths(cfg.model.layers)]


@functools.cache
def every_config() -> tuple[Config, ...]:
    return (*map(load_config, known_configs().split(", ")), BASE)


def random_words(rng: random.Random, cfg: Config, most: int, sections: Sequence[str]) -> list[str]:
    """Options that set up to `most` random fields, and what their sections need beside them."""
    fields = dict[str, object]()
    for path in rng.sample(paths_of(cfg, sections), rng.randint(1, most)):
        is_off = path in leaf_paths() and value_of(cfg, path.rpartition(".")[0]) is None
        found = {path: rng.choice(values_of(path, cfg))}
        fields |= setting(path, found[path]) if is_off else found
    return [word for path, value in fields.items() for word in (flag(path), written(value))]


@pytest.mark.parametrize("number", [10, pytest.param(5000, marks=pytest.mark.slow)])
def test_first_fixes_end_for_random_fields(number):
    rng = random.Random(number)
    lengths = set()
    for _ in range(number):
        cfg = rng.choice(every_config())
        try:
            cfg = parse_overrides(cfg, random_words(rng, cfg, 5, SECTIONS))
        except ConfigError:  # of reading, not of the rules
            continue
        lengths.add(len(follow(cfg)))
    assert set(range(4 if number > 100 else 3)) <= lengths  # there was something to follow


def wrong_configs(number: int, seed: int) -> Iterator[Config]:
    """Configs with a few random fields that break some rule."""
    rng = random.Random(seed)
    while number:
        cfg = rng.choice(every_config())
        try:
            cfg = parse_overrides(cfg, random_words(rng, cfg, 4, (*SECTIONS, "checkpoint")))
        except ConfigError:  # of reading, not of the rules
            continue
        try:
            check(cfg)
        except ConfigError:
            yield cfg
            number -= 1


@pytest.mark.parametrize("number", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_every_printed_fix_is_legal(number):
    """With it, and the first fixes of the other rules that are still broken, the config passes."""
    several, in_words, tried = 0, 0, 0
    for cfg in wrong_configs(number, number):
        with pytest.raises(ConfigError) as caught:
            check(cfg)
        errors = errors_of(caught.value)
        several += len(errors) > 1
        firsts = [fixes_of(error)[:1] for error in errors]
        in_words += sum(not first for first in firsts)
        for i, error in enumerate(errors):
            for fix in fixes_of(error):
                now = cfg
                for j, first in enumerate(firsts):
                    if i == j:  # the first fix of another rule may have ended its section
                        start = now if is_broken(now, error) else cfg
                        now = parse_overrides(start, options_in(fix))
                        tried += 1
                    elif first and is_broken(now, errors[j]):
                        now = parse_overrides(now, options_in(first[0]))
                        tried += 1
                for j, first in enumerate(firsts):  # an alternative leaves more to the others
                    if j != i and first and is_broken(now, errors[j]):
                        now = parse_overrides(now, options_in(first[0]))
                if all(firsts):
                    check(now)
                assert not is_broken(now, error), (str(error), fix)
    assert several > number // 10 and tried > number and 10 * in_words < number


def is_broken(cfg: Config, rule: ConfigError) -> bool:
    """Whether a config breaks a rule."""
    try:
        check(cfg)
    except ConfigError as error:
        return any(same_rule(one, rule) for one in errors_of(error))
    return False


def test_all_broken_rules_are_one_error():
    fields = {"train.num_steps": 0, "lora.rank": 4, "model.mtp_depth": 1, "dpo.beta": 0.1}
    with pytest.raises(ConfigError) as caught:
        check(replace(BASE, **fields))
    said = str(caught.value)
    assert "rules are broken" in said and "1. train.num_steps = 0" in said
    assert "lora.rank = 4: is not supported with model.mtp_depth = 1" in said
    assert "model.mtp_depth = 1: is not supported with dpo.beta = 0.1" in said


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["quikstart"], "quickstart"),
        (["Quickstart-MoE"], "quickstart_moe"),
        (["llama3-8b"], "llama3_8b"),
        (["gemma3/1b"], "gemma_3/1b"),
    ],
)
def test_a_name_that_is_nearly_one_is_suggested_first(arguments, fix):
    with pytest.raises(ConfigError, match="is not a config") as error:
        read_config(arguments)
    assert error.value.fix.startswith(f"use {fix},") or error.value.fix.startswith(f"use {fix};")
    load_config(fix)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["--config", "quickstart"], ["quickstart"]),
        (["--train.seed", "5", "quickstart"], ["quickstart", "--train.seed", "5"]),
        (["--resume", "RUN"], ["RUN"]),
        (["quickstart", "--resume", "RUN"], None),
        (["quickstart", "train.seed=5"], ["--train.seed", "5"]),
        (["quickstart", "+optimizer.learning_rate=1e-4"], ["--optimizer.learning-rate", "1e-4"]),
        (["quickstart", "lr=3"], ["--optimizer.learning-rate", "3"]),
        (["quickstart", "vocab_size=3"], ["--model.vocab-size", "3"]),
        (["quickstart", "--vocab-size", "3"], ["--model.vocab-size"]),
    ],
)
def test_styles_of_other_programs(arguments, fix, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    put = lambda words: [str(run) if word == "RUN" else word for word in words]  # noqa: E731
    with pytest.raises(ConfigError) as error:
        read_config(put(arguments))
    wanted = f"use {run} in place of CONFIG" if fix is None else " ".join(put(fix))
    assert error.value.fix.endswith(wanted)


def test_a_file_that_is_missing_is_no_unknown_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"CONFIG = 'mine.py': does not exist"):
        load_config("mine.py")
    assert not Path("mine.py").exists()


def test_a_gpu_that_is_like_no_other_is_not_taken_for_the_largest():
    with pytest.raises(ConfigError, match=r"known are h200, .*one of those that is no better"):
        gpu_named("rtx4090")
    with pytest.raises(ConfigError, match="Fix: use --gpu h100"):
        gpu_named("h10")


def test_a_default_comes_before_what_turns_something_on():
    path = "train.mtp_loss"
    cfg = replace(BASE, **{path: 0.3})
    with pytest.raises(ConfigError) as error:
        check(cfg)
    ways = error.value.fix.removeprefix("use ").split(", or ")
    defaults = [way == flag(path, default_of(path)) for way in ways]
    assert defaults == [True, *itertools.repeat(False, len(ways) - 1)] and len(ways) > 1
