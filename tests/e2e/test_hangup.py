"""A run whose terminal closes saves, and the same command resumes it."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpar.checkpoint.saved import saved_steps
from jaxpar.runtime import exit_codes
from tests.e2e.test_train import environment_of_start


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.parametrize("launched", [False, True])
def test_a_run_saves_when_its_terminal_closes(config_file, launched):
    run = Path(config_file).parent / "run"
    program = ["launch", "-n", "1", "--run.cpu-devices", "1", "--"] if launched else ["train"]
    command = [sys.executable, "-m", f"jaxpar.{program[0]}", *program[1:], config_file]
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [*command, "--train.num-steps", "100000"],
        env=environment_of_start(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: take(terminal),
    )
    os.close(terminal)
    said = b""
    until = time.monotonic() + 600
    while b"saved step 40" not in said and time.monotonic() < until:
        said += os.read(master, 65536)
    os.close(master)  # the terminal closes: SIGHUP, and writes to it fail
    assert process.wait(600) == exit_codes.EXIT_PREEMPTED, said.decode(errors="replace")
    assert saved_steps(run)[-1] > 40


def take(terminal: int) -> None:
    """Make it the controlling terminal of this process."""
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
