"""Programs start without what takes long to import, and only some need."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("jaxpar.train", "jax.experimental.pallas.mosaic_gpu"),  # the compiler of GPUs' kernels
        ("jaxpar.launch", "jax"),
    ],
)
def test_a_program_does_not_import(program, module):
    code = f"import sys, {program}; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
