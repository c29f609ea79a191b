"""Signals that ask a run to save and stop, and what happens to its output then."""

import io
import os
import pty
import signal
import sys

import pytest

from jaxpar.runtime import signals
from jaxpar.runtime.processes import children
from jaxpar.runtime.signals import StopRequest, output_may_be_lost
from jaxpar.runtime.terminal import safe_streams

NAMES = ["SIGTERM", "SIGINT", "SIGHUP"]


@pytest.fixture(autouse=True)
def own_handlers_and_streams():
    """As before, after each test."""
    numbers = [getattr(signal, name) for name in NAMES]
    before, streams = [signal.getsignal(number) for number in numbers], (sys.stdout, sys.stderr)
    yield
    sys.stdout, sys.stderr = streams
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def closed_pipe() -> io.TextIOWrapper:
    """A stream whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_contexts_of_output_end_in_any_order(first_to_end):
    """As those of two runs in two threads."""
    streams, both = (sys.stdout, sys.stderr), [output_may_be_lost(), output_may_be_lost()]
    for context in both:
        context.__enter__()
    print("printed once")
    both.pop(first_to_end).__exit__(None, None, None)
    assert sys.stdout is not streams[0] and sys.stderr is not streams[1]
    both.pop().__exit__(None, None, None)
    assert (sys.stdout, sys.stderr) == streams


def test_a_lenient_stream_may_be_wrapped(capsys):
    with output_may_be_lost(), safe_streams(), output_may_be_lost():
        print("shown\x1b")
    assert capsys.readouterr().out == "shown\\x1b\n"


@pytest.mark.parametrize("name", NAMES)
def test_each_asks_to_stop(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.due()
        os.kill(os.getpid(), number)
        assert stop.due() and stop.received == name
        again = signal.SIG_IGN if name == "SIGHUP" else signal.SIG_DFL
        assert signal.getsignal(number) == again
    assert signal.getsignal(number) == before


def test_a_second_sighup_changes_nothing():
    """A terminal that closes may send two."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == "SIGHUP"


def test_under_nohup_sighup_is_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.due()
    received = []
    children.on_signals(received.append)
    os.kill(os.getpid(), signal.SIGHUP)
    assert received == [] and signal.SIGHUP not in signals.heeded()


@pytest.mark.parametrize("name", NAMES)
def test_lost_output_does_not_keep_a_run_from_saving(name):
    sys.stdout = closed_pipe()
    with output_may_be_lost(), StopRequest():
        with pytest.raises(BrokenPipeError):
            print("a reader that is missed", flush=True)
        os.kill(os.getpid(), getattr(signal, name))
        print("saved step 10", flush=True)
    print("goodput", flush=True)


def test_a_closed_terminal_does_not_end_a_run():
    """As after `disown`, or under nohup with the output on the terminal."""
    master, terminal = pty.openpty()
    sys.stderr = os.fdopen(terminal, "w", buffering=1)
    os.close(master)
    with output_may_be_lost():
        print("step 10", file=sys.stderr, flush=True)
    print("goodput", file=sys.stderr, flush=True)


def test_output_that_is_read_arrives(capsys):
    with output_may_be_lost(), StopRequest():
        os.kill(os.getpid(), signal.SIGHUP)
        print("saved step 10", flush=True)
        print("twice", file=sys.stderr)
    found = capsys.readouterr()
    assert found == ("saved step 10\n", "twice\n")


def test_in_a_run_of_several_processes_it_is_passed_to_jax():
    """Which handles SIGTERM."""
    received = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    with StopRequest(several=True) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert received == [signal.SIGTERM] and stop.received == "SIGHUP"
