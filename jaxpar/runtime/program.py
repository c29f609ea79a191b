"""How a program runs and ends: its exit code, its words, its peers."""

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from jaxpar.config import ConfigError
from jaxpar.runtime import exit_codes


def run_program(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run a program's main on the command line, and end with its exit code.

    A ConfigError, too long a path or a platform that is not there becomes one line and code 2,
    Ctrl-C one and 130, no room for a file one and 1, and what other processes could not do one and
    theirs; other exceptions are shown whole.
    The process ends without Python's exit hooks: JAX would wait there for a peer that may be dead.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # of a terminal that lacks a sign, a "?"
    try:
        code, why = main(sys.argv[1:]) or exit_codes.EXIT_OK, ""
        sys.stdout.flush()
    except BaseException as error:
        code, why = _verdict(_of_a_long_name(error))
    _leave(code, why)


def _of_a_long_name(error: BaseException) -> BaseException:
    """An error; where it is that a path on the command line is too long, as a ConfigError."""
    if not (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG):
        return error
    rule, fix = "is too long for a name", "use one of 255 bytes at most"
    return ConfigError("path", f"{str(error.filename)[:60]}...", rule, fix)


def _verdict(error: BaseException) -> tuple[int, str]:
    """Say what went wrong. Returns: the exit code that it has, and the words."""
    if "jaxpar.runtime.start" in sys.modules:  # else it has started no JAX
        error = sys.modules["jaxpar.runtime.start"].of_a_platform(error)
    why = f"{type(error).__name__}: {error}"
    match error:
        case ConfigError():
            return _report(why := f"config error: {error}", exit_codes.EXIT_CONFIG), why
        case exit_codes.BadNumerics():
            return _report(why := f"bad numerics: {error}", exit_codes.EXIT_NUMERICS), why
        case exit_codes.RunError():
            return _report(why := f"error: {error}", exit_codes.EXIT_ERROR), why
        case KeyboardInterrupt():
            return _report(why := "interrupted", exit_codes.EXIT_INTERRUPTED), why
        case BrokenPipeError():
            why = "error: whatever read the output has closed it"
            return _report(why, exit_codes.EXIT_ERROR), why
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            file = f" for {error.filename}" if error.filename else ""  # a write has no name
            why = f"error: {error.strerror}{file}. Free space, and start the same command again"
            return _report(why, exit_codes.EXIT_ERROR), why
        case SystemExit():
            return _code_of(error), why
    # Without the module it has started no JAX, and has no peers.
    processes = sys.modules.get("jaxpar.runtime.processes.peers")
    if processes and isinstance(error, processes.PeerFailed | processes.PeersMissing):
        # What another process could not do has its code: this one is not at fault.
        code = getattr(error, "code", exit_codes.EXIT_ERROR)
        return _report(why := f"error: {error}", code), why
    traceback.print_exception(error)
    return exit_codes.EXIT_ERROR, why


@contextlib.contextmanager
def exit_on_failure() -> Iterator[None]:
    """With several processes, an exception within ends this one here, and nothing is tidied up.

    A save under way, say, would be waited for, and would wait for a process that is dead. Bad
    numerics and spikes of the loss come to all of them alike, and go on as with one process.
    """
    from jaxpar.runtime.processes import peers

    try:
        yield
    except BaseException as error:
        alike = isinstance(error, exit_codes.BadNumerics | exit_codes.Spike)
        if peers.world_size() == 1 or alike:
            raise
        _leave(*_verdict(error))


def _leave(code: int, why: str) -> NoReturn:
    """End this process; write why, and part from the others, if there are any."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if "jaxpar.runtime.processes.peers" in sys.modules:  # else it has started no JAX
        from jaxpar.runtime import watchdog
        from jaxpar.runtime.processes import peers

        well = code in (exit_codes.EXIT_OK, exit_codes.EXIT_PREEMPTED)
        if not well and code != exit_codes.EXIT_CONFIG:  # what is refused writes nothing
            with contextlib.suppress(OSError):
                watchdog.last_words(code, why)
        peers.leave(well)
    os._exit(code)


def _report(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def _code_of(stop: SystemExit) -> int:
    """As Python would end: None is success, text is printed and is an error."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or exit_codes.EXIT_OK
    return _report(str(stop.code), exit_codes.EXIT_ERROR)
