"""Command lines read as dataclasses: values, errors of one line, and help."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from jaxpar.commands import COMMANDS, module_of
from jaxpar.config import ConfigError
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.layout.fields import FIELDS
from jaxpar.config.option_fields import declared
from jaxpar.config.options import Argument, OnlyFields, Range, Step, Written, read_options


@dataclass(frozen=True, kw_only=True)
class How:
    """Options that several forms share."""

    seed: int = 0
    """A seed."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form."""

    run: Annotated[str, Argument("RUN")]
    """A folder."""
    others: Annotated[tuple[str, ...], Argument("OTHER")] = ()
    """Other folders."""
    count: Annotated[int, Range(1, 100, 7), Written(short="-c")] = 3
    """A number."""
    share: float = 0.5
    """A share."""
    kind: Literal["all", "one"] = "all"
    """A choice."""
    step: Step = None
    """A step."""
    words: tuple[str, ...] = ()
    """Words."""
    save: bool = False
    """Whether to save."""
    check: bool = True
    """Whether to check."""
    how: How = dataclasses.field(default_factory=How)


@dataclass(frozen=True, kw_only=True)
class OfConfig:
    """A form with a config."""

    config: ConfigArguments
    count: int = 1
    """A number."""


@dataclass(frozen=True, kw_only=True)
class OfCluster:
    """A form with some fields of a config."""

    config: Annotated[ConfigArguments, OnlyFields(("cluster", "run.cpu_devices"))]


def read(*argv: str, form=Form):
    return read_options(form, argv, "python -m jaxpar.form", "A form.")


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ("", {}),
        ("--count 5 --share 2e-1", {"count": 5, "share": 0.2}),
        ("--count=5 -c 6", {"count": 6}),
        ("b c --kind one", {"others": ("b", "c"), "kind": "one"}),
        ("--step best", {"step": "best"}),
        ("--step 12", {"step": 12}),
        ("--step none", {"step": None}),
        ("--words a b --words c --save", {"words": ("a", "b", "c"), "save": True}),
        ("--words=--a --no-check", {"words": ("--a",), "check": False}),
        ("--save=False --check", {}),
        ("--seed 4", {"how": How(seed=4)}),
        ("-- --b", {"others": ("--b",)}),
    ],
)
def test_options_are_read(argv, values):
    assert read("a", *argv.split()) == Form(run="a", **values)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("a --count x", "--count = 'x': must be a whole number. Fix: use --count 7."),
        ("a --count ٣", "--count = '٣': must be a whole number. Fix: use --count 7."),
        ("a --share ٠", "--share = '٠': must be a number. Fix: use --share 0.5."),
        ("a --count", "--count = '': needs a value. Fix: use --count 7."),
        ("a --count --share 3", "--count = '': needs a value. Fix: use --count 7."),
        ("a --count 0", "--count = 0: must be at least 1. Fix: use --count 7."),
        ("a --count 1000", "--count = 1000: must be at most 100. Fix: use --count 7."),
        ("a --kind on", "--kind = 'on': must be one of all, one. Fix: use --kind one."),
        ("a --cuont 3", "is not an option of python -m jaxpar.form. Fix: use --count."),
        ("a --nothing 3", "Fix: see python -m jaxpar.form --help."),
        ("a --save=maybe", "--save = 'maybe': must be True or False."),
        ("", "RUN = '': is missing. Fix: use python -m jaxpar.form RUN OTHER."),
        ("s3://b/a", "RUN = 's3://b/a': "),
    ],
)
def test_an_error_is_one_line(argv, error, capsys):
    with pytest.raises(ConfigError) as caught:
        read(*argv.split())
    assert error in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_a_config_and_options_in_any_order():
    for argv in (
        "quickstart --count 2 --train.seed 3 --set data.seq-len=64 train.num-steps=5",
        "--count 2 quickstart --train.seed 3 --set data.seq-len=64 train.num-steps=5",
        "--train.seed 3 --set data.seq-len=64 train.num-steps=5 --count 2 -- quickstart",
    ):
        options = read(*argv.split(), form=OfConfig)
        cfg = options.config.asked()
        assert (options.count, options.config.name, cfg.train.seed) == (2, "quickstart", 3)
        assert (cfg.data.seq_len, cfg.train.num_steps) == (64, 5)


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        ("quickstart --cuont 2", "use --count"),
        ("quickstart --lr 2", "use --optimizer.learning-rate"),
        ("quickstart --train.sed 2", "use --train.seed"),
        ("quickstart --train.seed", "use --train.seed 0"),
        ("quickstart --train.seed x", "use --train.seed 0"),
        ("quikstart", "use quickstart"),
        ("quickstart llama3_8b", "see --help"),
        ("quickstart train.seed=3", "use --train.seed 3"),
        ("--count 2", "use a config such as quickstart"),
    ],
)
def test_a_wrong_config_is_refused_when_it_is_read(argv, fix):
    with pytest.raises(ConfigError, match=f"Fix: {fix}"):
        read(*argv.split(), form=OfConfig)


def test_only_some_fields():
    options = read("--cluster.num-processes", "2", "--run.cpu-devices=4", form=OfCluster)
    assert options.config.asked().run.cpu_devices == 4
    for wrong in (["--train.seed", "3"], ["--run.dir", "x"], ["--set", "train.seed=3"]):
        with pytest.raises(ConfigError, match=r"is not an option of python -m jaxpar\.form"):
            read(*wrong, form=OfCluster)
    with pytest.raises(ConfigError, match="one argument too many"):
        read("quickstart", form=OfCluster)


def test_forms_are_subcommands_or_uses():
    forms = {"one": Form, "two": How}
    assert read("two", "--seed", "3", form=forms) == How(seed=3)
    with pytest.raises(ConfigError, match=r"Fix: use python -m jaxpar\.form one"):
        read("onee", form=forms)
    forms = {"": Form, "--two": How}
    assert read("--seed", "3", "--two", form=forms) == How(seed=3)
    assert read("a", form=forms) == Form(run="a")
    forms = {"": Form, "--two": How, "--three": How}
    with pytest.raises(ConfigError, match=r"cannot be combined with --two\. Fix: use one of both"):
        read("--two", "--three", form=forms)


def test_help_shows_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m jaxpar.form RUN OTHER [options]\n\nA form.\n")
    assert max(map(len, shown.splitlines())) <= 100
    for line in (
        "  RUN                         A folder.",
        "  -c, --count N               A number. (default: 3)",
        "  --kind {all,one}            A choice. (default: all)",
        "  --step N|best               A step.",
        "  --words TEXT [...]          Words.",
        "  --save                      Whether to save.",
        "  --[no-]check                Whether to check. (default: on)",
        "  --seed N                    A seed. (default: 0)",
    ):
        assert line in shown.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_meaning(name):
    forms = module_of(name).OPTIONS
    for form in forms.values() if isinstance(forms, dict) else [forms]:
        assert form.__doc__ and not form.__doc__.startswith(form.__name__ + "(")
        assert all(one.meaning for one in declared(form)), form


def test_plan_names_the_fields_that_a_layout_sets():
    (fix,) = (one for one in declared(module_of("plan").OPTIONS[""]) if one.name == "--fix")
    assert fix.meaning == f"Fix fields of the layout: {', '.join(FIELDS)}."
