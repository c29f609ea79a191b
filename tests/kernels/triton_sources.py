"""Programs with Triton kernels, lowered without Triton: a call carries the kernel's source."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax

from jaxpar.kernels.attention.triton import compiler

#: The custom call of `jax_triton`.
TARGET = "triton_kernel_call"


@contextlib.contextmanager
def sources() -> Iterator[None]:
    """Lower Triton kernels as calls that carry their source, instead of compiling them."""
    with mock.patch.object(compiler, "called", _with_source):
        yield


def _with_source(*operands, kernel, out_shape, name, num_warps, num_stages, grid, **_):
    source = f"{kernel[0]}\n# {num_warps} warps, {num_stages} stages, {grid[0]} programs"
    return jax.ffi.ffi_call(TARGET, out_shape)(*operands, source=source, name=name)
