"""Numbers as people type them, and the largest values of fields and options."""

import typing
from pathlib import Path

import pytest

from jaxpar.commands import COMMANDS, module_of
from jaxpar.components.ranges import MAX_INT, Range, Size, declared_range
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.config.fields import field_types, range_of, unknown_field
from jaxpar.config.layers import OURS
from jaxpar.config.listed import members
from jaxpar.config.numerals import number, only_digits, whole_number
from jaxpar.config.option_fields import declared
from jaxpar.config.rules.numbers import numbers
from jaxpar.config.validate import check
from tests.config.models import setting

PACKAGE = Path(__file__).resolve().parents[2] / "jaxpar"

#: "34" in the digits of Arabic and of Devanagari, in full width, and with a superscript.
FOREIGN = ("٣٤", "३४", "３４", "3²")


@pytest.mark.parametrize("text", FOREIGN)
def test_only_ascii_digits_are_numbers(text):
    assert not only_digits(text)
    for read in (whole_number, number):
        with pytest.raises(ValueError, match="is not a"):
            read(text)
    for option in ("train.num_steps", "optimizer.learning_rate"):
        with pytest.raises(ConfigError, match=f"{option} = '{text}': must be a"):
            parse_overrides(Config(), [f"--{option}", text])


def test_numbers_are_read():
    assert [whole_number(text) for text in ("34", "-1", "10_000", " 7")] == [34, -1, 10_000, 7]
    assert [number(text) for text in ("3e-4", "-1", "inf")] == [3e-4, -1.0, float("inf")]
    with pytest.raises(ValueError, match="is not a whole number"):
        whole_number("9" * 5000)


# ------------------------------------------------------------------------------------- fields


WHOLE = [path for path, hint in field_types().items() if hint in (int, int | None)]


@pytest.mark.parametrize("path", WHOLE)
def test_a_whole_number_outside_its_range_is_refused(path):
    allowed = range_of(path) or Range(-MAX_INT - 1, MAX_INT)
    for bound, outside in ((allowed.least, -1), (allowed.most, 1)):
        errors = numbers(replace(Config(), **setting(path, bound + outside)))
        assert [error.field for error in errors] == [path], bound
    for bound in (allowed.least, allowed.most):
        assert not numbers(replace(Config(), **setting(path, bound)))


def test_the_sizes_of_a_model_are_bounded():
    """Each size alone: the memory of all together is compared with the host's before the start."""
    assert all(range_of(f"model.{name}").most < 1 << 27 for name in ("d_model", "vocab_size"))
    for cls in OURS.values():
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            if hint == Size or name in ("d_ff", "num_experts", "kv_lora_rank", "q_lora_rank"):
                assert declared_range(hint).most < 1 << 27, (cls, name)


def test_numbers_of_components_have_ranges():
    """Every whole number of a component of jaxpar; errors have its address."""
    for cls in OURS.values():
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            if int in (hint, *typing.get_args(hint)[:1]) and not name.startswith("_"):
                assert declared_range(hint), (cls, name)
    with pytest.raises(ConfigError, match=r"mixer.head_dim = 0: must be at least 1.*-dim 8"):
        options = ["--model.*.mixer.head-dim", "0"]
        check(parse_overrides(load_config("sigmoid_attention"), options))


# ------------------------------------------------------------------------------------ options


def every_form() -> list[type]:
    """The dataclasses of options of all commands."""
    named = [module_of(name).OPTIONS for name in COMMANDS]
    return [form for one in named for form in (one.values() if isinstance(one, dict) else [one])]


@pytest.mark.parametrize("form", every_form(), ids=lambda form: form.__name__)
def test_every_whole_number_of_an_option_has_a_range(form):
    for one in declared(form):
        if int in members(one.item) and one.name != "--num-processes":  # which the host limits
            if one.name == "--steps" and one.takes_several:
                continue  # of checkpoints
            ranges = [mark for mark in one.marks if isinstance(mark, Range)]
            assert len(ranges) == 1 and ranges[0].good in ranges[0], one.name


def test_no_program_reads_numbers_in_another_way():
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert "type=int" not in text and "argparse.ArgumentParser" not in text, file


# ------------------------------------------------------------------------- what was meant


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("optimizer.lr", "use optimizer.learning_rate"),
        ("lr", "use optimizer.learning_rate"),
        ("train.lr", "use optimizer.learning_rate"),
        ("optimizer.wd", "use optimizer.weight_decay"),
        ("train.bs", "use train.global_batch_size"),
        ("train.batch_size", "use train.global_batch_size"),
        ("train.steps", "use train.num_steps"),
        ("model.n_layer", "use model.num_layers"),
        ("parallel.tp", "use parallel.tensor"),
        ("optimizer.learning_rat", "use optimizer.learning_rate"),
    ],
)
def test_a_wrong_name_gives_the_field_that_was_meant(path, fix):
    assert unknown_field(path, 3).fix == fix


def test_a_name_like_none_gives_a_few_fields():
    fix = unknown_field("optimizer.zzz", 3).fix
    assert fix.startswith("use one of optimizer.")
    assert fix.count("optimizer.") == 3
    assert fix.endswith("or see --help optimizer")
