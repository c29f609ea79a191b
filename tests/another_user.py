"""Runs a function as a user who is not root and owns nothing, in a child process."""

import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: A user without rights.
NOBODY = 65534


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a folder that all users can reach; `tmp_path` is this user's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_another_user(call: Callable[[], object]) -> str:
    """Return what a call returns, or the exception that it raises, as text.

    Root may do everything, so the call runs as `NOBODY` then. It runs in a forked process: it must
    use no thread, and so neither JAX nor TensorStore.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the call needs no thread of this process
        child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            try:
                text = str(call())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(write, text.encode()[:60_000])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as opened:
        text = opened.read().decode()
    os.waitpid(child, 0)
    return text
