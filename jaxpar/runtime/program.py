"""Run a program, report its errors, and end it with an exit code."""

import contextlib
import errno
import io
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jaxpar.config import ConfigError
from jaxpar.config.command_line import require_unicode
from jaxpar.runtime import exit_codes, terminal
from jaxpar.runtime.terminal import safe_streams

#: Characters of a command line that an error shows.
MAX_ASKED = 400


def run_program(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run a program's main on the command line, and end with its exit code.

    These errors are reported in one line: a ConfigError, a path that is too long or that this user
    may not use, or a missing platform (code 2), Ctrl-C (130), a full disk or memory (1), a RunError
    and failures of other processes (their code). Other exceptions are reported with a traceback.
    The process ends without Python's exit hooks, in which JAX would wait for a peer that may be
    dead.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Print "?" for characters that the terminal's encoding does not have.
        sys.stdout.reconfigure(errors="replace")
    with safe_streams():
        try:
            require_unicode(sys.argv[1:])
            code, why = main(sys.argv[1:]) or exit_codes.EXIT_OK, ""
            sys.stdout.flush()
        except BaseException as error:
            code, why = _verdict(error)
        _leave(code, why)


def _out_of_memory(told: str, argv: Sequence[str]) -> str:
    asked = shlex.join([Path(argv[0]).name, *argv[1:]])
    asked = f"{asked[:MAX_ASKED]}..." if len(asked) > MAX_ASKED else asked
    why = f": {' '.join(told.split())}" if told else ""
    return f"error: out of host memory{why}. Asked for: {asked}. Ask for less, or free memory"


def _of_a_path(error: BaseException) -> BaseException:
    """Convert an error that a path of the user's causes to a ConfigError."""
    if not (isinstance(error, OSError) and error.filename is not None):
        return error
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "?"
    match error.errno:
        case errno.ENAMETOOLONG:
            rule, fix = "is too long for a file name", "use at most 255 bytes"
            return ConfigError("path", f"{path[:60]}...", rule, fix)
        case errno.ELOOP:
            rule, fix = "leads to itself through symbolic links", "correct the links"
            return ConfigError("path", path, rule, fix)
        case errno.EACCES | errno.EPERM | errno.EROFS:
            rule = f"may not be used by this user ({error.strerror})"
            fix = "change its permissions, or use another path"
            return ConfigError("path", path, rule, fix)
    return error


def _verdict(error: BaseException) -> tuple[int, str]:
    """Report an error. Returns:  its exit code and its text."""
    error = _of_a_path(error)
    if "jaxpar.runtime.start" in sys.modules:  # otherwise JAX has not been started
        error = sys.modules["jaxpar.runtime.start"].of_a_platform(error)
    why = f"{type(error).__name__}: {error}"
    match error:
        case ConfigError():
            return _report(why := f"config error: {error}", exit_codes.EXIT_CONFIG), why
        case exit_codes.BadNumerics():
            return _report(why := f"bad numerics: {error}", exit_codes.EXIT_NUMERICS), why
        case exit_codes.RunError():
            return _report(why := f"error: {error}", error.code), why
        case KeyboardInterrupt():
            return _report(why := "interrupted", exit_codes.EXIT_INTERRUPTED), why
        case BrokenPipeError():
            why = "error: the reader of the output has closed it"
            return _report(why, exit_codes.EXIT_ERROR), why
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            file = f" for {error.filename}" if error.filename else ""  # writes have no name
            why = f"error: {error.strerror}{file}. Free space, and run the same command again"
            return _report(why, exit_codes.EXIT_ERROR), why
        case MemoryError():
            why = _out_of_memory(str(error), sys.argv)
            return _report(why, exit_codes.EXIT_ERROR), why
        case SystemExit():
            return _code_of(error), why
    # Without the module, the program has not started JAX and has no peers.
    processes = sys.modules.get("jaxpar.runtime.processes.peers")
    if processes and isinstance(error, processes.PeerFailed | processes.PeersMissing):
        # Use the other process's code, since this process is not at fault.
        code = getattr(error, "code", exit_codes.EXIT_ERROR)
        return _report(why := f"error: {error}", code), why
    traceback.print_exception(error)
    return exit_codes.EXIT_ERROR, why


def end_with(error: BaseException) -> NoReturn:
    """End this process as if an exception had ended the program. From any thread."""
    _leave(*_verdict(error))


def _leave(code: int, why: str) -> NoReturn:
    """End this process: record the reason, and leave the other processes."""
    if "jaxpar.runtime.stages" in sys.modules:
        sys.modules["jaxpar.runtime.stages"].end_live()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if "jaxpar.runtime.processes.peers" in sys.modules:  # otherwise JAX has not been started
        from jaxpar.runtime import watchdog
        from jaxpar.runtime.processes import peers

        well = code in (exit_codes.EXIT_OK, exit_codes.EXIT_PREEMPTED)
        if not well and code != exit_codes.EXIT_CONFIG:  # config errors write no files
            with contextlib.suppress(OSError):
                watchdog.last_words(code, why)
        peers.leave(well)
    os._exit(code)


def _report(text: str, code: int) -> int:
    terminal.say(text, stderr=True)
    return code


def _code_of(stop: SystemExit) -> int:
    """Return the exit code as Python does: None is success, text is printed and is an error."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or exit_codes.EXIT_OK
    return _report(str(stop.code), exit_codes.EXIT_ERROR)
