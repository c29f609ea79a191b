"""Programs start without the compilers of kernels, which only GPUs need."""

import subprocess
import sys

COMPILER = "jax.experimental.pallas.mosaic_gpu"


def test_training_imports_no_compiler_of_mosaic():
    code = f"import sys, jaxpar.train; print({COMPILER!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
