"""Numbers as people type them, and the largest values of fields and options."""

from pathlib import Path

import pytest

from jaxpar.commands import COMMANDS, module_of
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import members, parse_overrides
from jaxpar.config.fields import leaf_paths, unknown_field
from jaxpar.config.numerals import number, only_digits, whole_number
from jaxpar.config.option_fields import declared
from jaxpar.config.rules.limits import MOST, Range, most_of
from jaxpar.config.rules.numbers import numbers

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


@pytest.mark.parametrize("path", MOST)
def test_a_field_above_its_limit_is_refused(path):
    assert path in leaf_paths()
    (error,) = numbers(replace(Config(), **{path: MOST[path] + 1}))
    assert error.field == path and error.rule == f"must be at most {MOST[path]}"
    assert not numbers(replace(Config(), **{path: MOST[path]}))


def test_the_sizes_of_a_model_are_bounded():
    """Each size alone: the memory of all together is compared with the host's before the start."""
    sizes = "num_layers d_model num_heads num_kv_heads head_dim d_ff num_experts vocab_size".split()
    assert all(most_of(f"model.{name}") < 1 << 27 for name in sizes)


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
