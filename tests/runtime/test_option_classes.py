"""Command lines read as dataclasses: every error is one line."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import tyro
from jaxpar.runtime.options import Parser

from jaxpar.config import ConfigError
from jaxpar.config.options import read_options
from jaxpar.config.rules.limits import Range
from jaxpar.data.__main__ import read_command
from jaxpar.runtime.processes.launcher import read_command as read_launch


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form."""

    run: Annotated[str, tyro.conf.Positional]
    """A folder."""
    count: Annotated[int, Range(1, 100, 7)] = 3
    """A number."""
    share: float = 0.5
    """A share."""


def read(*argv: str) -> Form:
    return read_options(Form, argv, "jaxpar.form", "A form.")


def test_options_are_read():
    assert read("a", "--count", "5", "--share", "2e-1") == Form(run="a", count=5, share=0.2)


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (("a", "--count", "x"), "--count: 'x' is not a whole number"),
        (("a", "--count", "٣"), "--count: '٣' is not a whole number"),
        (("a", "--share", "٠"), "--share: '٠' is not a number"),
        (("a", "--count"), "Missing value for argument '--count'"),
        (("a", "--nothing", "3"), "Unrecognized options: --nothing"),
        ((), "Missing from python -m jaxpar.form: STR A folder."),
    ],
)
def test_an_error_is_one_line(argv, rule, capsys):
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    assert rule in caught.value.rule
    assert "\n" not in str(caught.value)
    assert not set("│╭╮─|+") & set(str(caught.value))
    assert "----" not in str(caught.value)
    assert caught.value.fix == "see python -m jaxpar.form --help"
    out, err = capsys.readouterr()
    assert out == err == ""


@pytest.mark.parametrize(("value", "rule"), [(0, "at least 1"), (10**25, "at most 100")])
def test_a_number_beyond_its_range_is_refused(value, rule):
    with pytest.raises(ConfigError, match=f"--count = {value}: must be {rule}. Fix: use --count 7"):
        read("a", "--count", str(value))


def test_help_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    assert "A number." in capsys.readouterr().out


def test_programs_read_so():
    with pytest.raises(ConfigError, match="'x' is not a whole number"):
        read_launch(["-n", "x", "--", "quickstart"])
    with pytest.raises(ConfigError, match="Unrecognized options: prepar"):
        read_command(["prepar"])


def test_whole_numbers_of_a_parser_are_checked():
    parser = Parser("python -m jaxpar.form", "A form.")
    parser.whole("--num-steps", 5, Range(0, 10_000, 5))
    assert parser.parse_args([]).num_steps == 5
    assert parser.parse_known_args(["--num-steps", "7", "--more"]) == (
        parser.parse_args(["--num-steps", "7"]),
        ["--more"],
    )
    with pytest.raises(ConfigError, match=r"--num-steps = 1000000000000: must be at most 10,000"):
        parser.parse_args(["--num-steps", str(10**12)])
    with pytest.raises(ConfigError, match="--num-steps: '٣' is not a whole number"):
        parser.parse_args(["--num-steps", "٣"])
