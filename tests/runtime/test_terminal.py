"""What reaches a terminal: no escape sequence of a stranger, and of models only in a pipe."""

import contextlib
import os
import pty
import sys

import pytest
from rich.table import Table

from jaxpar.checkpoint.__main__ import OPTIONS
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.config.options import read_options
from jaxpar.config.printable import printable
from jaxpar.runtime import program, terminal
from jaxpar.runtime.signals import output_may_be_lost

#: A text that clears the screen, sets the title, colors, reverses its end, and forges a line.
HOSTILE = "\x1b[2Ja\x1b]0;b\x07\x9b31mc\u202ed\u2066e\x08\x7f\udcff"

SHOWN = r"\x1b[2Ja\x1b]0;b\x07\x9b31mc\u202ed\u2066e\x08\x7f\udcff"


def test_control_characters_are_shown_as_escapes():
    assert printable(HOSTILE) == SHOWN
    assert printable("a\n\tb") == r"a\n\tb"
    assert printable("a\n\tb", "\n\t") == "a\n\tb"
    kept = "é ü 日本 עברית 👩\u200d🔬 \\x1b"
    assert printable(kept) == kept


@pytest.mark.parametrize("part", range(4))
def test_no_part_of_an_error_reaches_the_terminal_raw(part):
    texts = ["a"] * 4
    texts[part] = HOSTILE + "\n"
    assert printable(told := str(ConfigError(*texts))) == told


def test_an_error_about_a_long_text_is_short():
    error = ConfigError("a", "x" * 10**6, "y" * 10**6, "z" * 10**6)
    assert error.value == "x" * 10**6 and len(str(error)) < 7_000
    assert str(error).startswith("a = 'xxx") and str(error).endswith("zzz.")
    assert str(ConfigError("a", "x" * 1900, "b", "c")) == f"a = '{'x' * 1900}': b. Fix: c."


def test_a_program_prints_no_control_characters(monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "argv", ["program"])

    def main(_):
        print(HOSTILE)
        terminal.console().print(HOSTILE, markup=False)
        table = Table()
        table.add_row(HOSTILE)
        terminal.console(width=200).print(table)
        print("50%\r100%", file=sys.stderr)
        raise ValueError(HOSTILE)

    program.run_program(main)
    out, err = capsys.readouterr()
    assert SHOWN in out and out.count(r"\x1b[2Ja\x1b]0;b") == 3  # rich leaves out the bell
    assert err.startswith("50%\r100%\nTraceback") and SHOWN in err
    assert printable(out + err, "\n\r") == out + err
    assert not isinstance(sys.stdout, terminal.SafeStream)


def test_a_models_text_is_raw_in_a_pipe_and_escaped_on_a_terminal(capfd):
    with terminal.safe_streams():
        terminal.write_generated("\x1b[2J\r\n")
    assert capfd.readouterr().out == "\x1b[2J\r\n"
    reader, writer = pty.openpty()
    with open(writer, "w", closefd=True) as screen, contextlib.redirect_stdout(screen):
        with terminal.safe_streams():
            terminal.write_generated("\x1b[2Jé\n")
        assert os.read(reader, 100) == rb"\x1b[2J" + "é\r\n".encode()
    os.close(reader)


@pytest.mark.parametrize("more", [contextlib.nullcontext, output_may_be_lost])
def test_a_progress_bar_still_draws(more):
    reader, writer = pty.openpty()
    with open(writer, "w", closefd=True) as screen, contextlib.redirect_stderr(screen):
        with (
            terminal.safe_streams(),
            more(),
            terminal.console(stderr=True, force_terminal=True).status("working"),
        ):
            pass
        shown = os.read(reader, 4096)
        assert b"\x1b[" in shown and b"x1b" not in shown
    os.close(reader)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("checkpoint", ["replay", "x", "--step", "3", f"--{HOSTILE[:-1]}"], "is not an option of"),
        ("checkpoint", ["replay", "x"], "--step = '': is missing"),
        ("checkpoint", ["replay", "x", "--step", "a"], "--step = 'a': must be a whole number"),
        ("checkpoint", ["replay", "x", "--step", "1", "--stpe", "1"], "Fix: use --step"),
        ("sample", ["x", "--prompt", "\udcff"], "not utf-8"),
        ("sample", ["\udcff"], "not utf-8"),
    ],
)
def test_a_mistake_on_a_command_line_is_one_safe_line(name, args, said, capsys):
    with pytest.raises(ConfigError, match=said) as error:
        call(name, args)
    assert "─" not in str(error.value) and printable(str(error.value)) == str(error.value)
    assert capsys.readouterr() == ("", "")


def test_bytes_that_are_not_unicode_are_refused_by_every_program(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "argv", ["program", "a\udcff"])
    program.run_program(lambda _: pytest.fail("must not run"))
    assert codes == [2]
    assert capsys.readouterr().err == (
        r"config error: command line = 'a\udcff': has a byte that is not utf-8, character 2. "
        "Fix: use UTF-8 text.\n"
    )


def test_help_is_printed_and_ends_the_program(capsys):
    with pytest.raises(SystemExit) as stop:
        read_options(OPTIONS["replay"], ["--help"], "x", "About.")
    assert stop.value.code == 0
    assert "About." in capsys.readouterr().out


def test_a_lack_of_memory_is_one_line(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "argv", ["/bin/jaxpar", "plan", "--largest", "b c"])

    def main(_):
        raise MemoryError("Unable to allocate 3 TiB")

    program.run_program(main)
    assert codes == [1]
    assert capsys.readouterr().err == (
        "error: out of host memory: Unable to allocate 3 TiB. "
        "Asked for: jaxpar plan --largest 'b c'. Ask for less, or free memory\n"
    )
