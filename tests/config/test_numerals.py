"""Numbers as people type them, and the largest values of fields and options."""

import dataclasses
import importlib
import typing
from pathlib import Path

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.fields import leaf_paths, unknown_field
from jaxpar.config.numerals import number, only_digits, whole_number
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
    with pytest.raises(ConfigError, match=f"must be at most {MOST[path]}"):
        numbers(replace(Config(), **{path: MOST[path] + 1}))
    numbers(replace(Config(), **{path: MOST[path]}))


def test_the_sizes_of_a_model_are_bounded():
    """Each size alone: the memory of all together is compared with the host's before the start."""
    sizes = "num_layers d_model num_heads num_kv_heads head_dim d_ff num_experts vocab_size".split()
    assert all(most_of(f"model.{name}") < 1 << 27 for name in sizes)


# ------------------------------------------------------------------------------------ options

FORMS = {
    "jaxpar.inference.sample": ("SampleOptions",),
    "jaxpar.inference.evaluate": ("EvaluateOptions",),
    "jaxpar.inference.generation": ("Sampling",),
    "jaxpar.verification.replay": ("ReplayOptions",),
    "jaxpar.profiling.command": ("ProfileOptions",),
    "jaxpar.data.__main__": ("PrepareOptions", "ChatOptions", "ConvertOptions", "InspectOptions"),
    "jaxpar.convert.__main__": ("FromHf", "FromPeft", "ToHf", "ToPeft", "ToTorch"),
    "jaxpar.checkpoint.__main__": ("Ls", "Verify", "BranchOff"),
    "jaxpar.report.__main__": ("ReportOptions",),
    "jaxpar.runtime.processes.launcher": ("LaunchOptions",),
}

#: Its limit depends on the host.
BY_THE_HOST = {("LaunchOptions", "num_processes")}


@pytest.mark.parametrize(("module", "form"), [(m, f) for m, names in FORMS.items() for f in names])
def test_every_whole_number_of_an_option_class_has_a_range(module, form):
    options = getattr(importlib.import_module(module), form)
    hints = typing.get_type_hints(options, include_extras=True)
    plain = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        kinds = {plain[field.name], *typing.get_args(plain[field.name])}
        if int in kinds and (form, field.name) not in BY_THE_HOST:
            ranges = [one for one in hints[field.name].__metadata__ if isinstance(one, Range)]
            assert len(ranges) == 1, field.name
            assert ranges[0].good in ranges[0]


def test_every_other_parser_uses_ranges():
    """`Parser.whole` and `read_options`: no program reads numbers in another way."""
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert "type=int" not in text, file
        assert file.name == "option_classes.py" or "tyro.cli(" not in text, file


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
