"""The source of Triton kernels computes what Pallas interprets: NumPy stands in for Triton."""

import functools
import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.kernels.attention.triton import api as triton
from jaxpar.kernels.attention.triton import compiler
from jaxpar.kernels.attention.triton.blocks import TritonBackward, TritonForward
from jaxpar.kernels.platform import MISSING, Platform, compiling_for
from jaxpar.kernels.recurrence.triton import api as recurrence
from jaxpar.kernels.take_largest import by_kernel
from tests.kernels.cases import Case, inputs_of
from tests.kernels.test_triton_lowering import GPU

HOPPER = Platform("gpu", GPU["9.0"], "9.0")


class Tile(np.ndarray):
    """A tensor of Triton's."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)


class Pointer:
    """Addresses in an array."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, by):
        return Pointer(self.array, self.at + by)


def tile(x, dtype=None):
    return np.asarray(x, dtype).view(Tile)


def _store(pointer, values, mask=True):
    at, values, mask = np.broadcast_arrays(pointer.at, values, mask)
    pointer.array[at[mask]] = values[mask]


def _dot(a, b, input_precision, out_dtype):
    return tile(a.astype(np.float32) @ b.astype(np.float32))


def _reduce(by):
    return lambda x, axis: tile(by(x, axis=axis))


LANGUAGE = dict(
    **{name: jnp.dtype(name) for name in ("int32", "int64", "float32", "bfloat16", "float16")},
    int1=np.dtype(bool),
    PropagateNan=SimpleNamespace(ALL=None),
    arange=lambda a, b: tile(np.arange(a, b, dtype=np.int32)),
    full=lambda shape, x, dtype: tile(np.full(shape, x, dtype)),
    load=lambda pointer: tile(pointer.array[pointer.at]),
    store=_store,
    dot=_dot,
    trans=np.transpose,
    where=lambda which, a, b: tile(np.where(which, a, b), np.result_type(a, b)),
    maximum=lambda a, b, propagate_nan: np.maximum(a, b),
    minimum=lambda a, b, propagate_nan: np.minimum(a, b),
    broadcast_to=lambda x, shape: np.broadcast_to(x, shape).view(Tile),
    reshape=np.reshape,
    cumsum=lambda x, axis: np.cumsum(x, axis, dtype=x.dtype),
    max=_reduce(np.max),
    sum=lambda x, axis: tile(np.sum(x, axis=axis, dtype=x.dtype)),
    inline_asm_elementwise=lambda text, constraints, args, **_: args[0],
    **{name: getattr(np, name) for name in ("exp", "exp2", "log")},
)


@pytest.fixture
def numpy_for_triton(monkeypatch):
    """Run the source of kernels in NumPy, one program after the other."""
    package, language = ModuleType("triton"), ModuleType("triton.language")
    package.jit, package.language = (lambda function: function), language
    for name, value in LANGUAGE.items():
        setattr(language, name, value)
    monkeypatch.setitem(sys.modules, "triton", package)
    monkeypatch.setitem(sys.modules, "triton.language", language)

    def called(*operands, kernel, out_shape, grid, **_):
        names: dict = {}
        exec(kernel[0], names)

        def run(*arrays):
            flat = [np.array(a).reshape(-1) for a in arrays]
            made = [np.full(x.size, 77, x.dtype) for x in out_shape]
            for number in range(grid[0]):
                language.program_id = lambda axis, number=number: tile(number, np.int32)
                with np.errstate(all="ignore"):
                    names[kernel[1]](*map(Pointer, [*flat, *made]))
            return [a.reshape(x.shape) for a, x in zip(made, out_shape, strict=True)]

        return jax.pure_callback(run, list(out_shape), *operands)

    monkeypatch.setattr(compiler, "called", called)
    with compiling_for(HOPPER):
        yield


def compare(function, *arguments, atol):
    """Run `function(*arguments, interpret=)` by the source, and by Pallas' interpreter."""
    found, wanted = (
        jax.jit(functools.partial(function, interpret=interpret))(*arguments)
        for interpret in (False, True)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=atol * np.abs(b).max())


CASES = [
    (Case(T=48, H=4, G=2, K=48, dtype="bfloat16", documents=3), None),
    (Case(T=40, S=56, H=2, G=1, K=16, dtype="bfloat16", order="permuted", window=20), 2.0),
]


@pytest.mark.parametrize(("case", "softcap"), CASES, ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_attention(case, softcap, overlap, numpy_for_triton):
    x = inputs_of(case)
    q, k, v = (a.astype(jnp.bfloat16) for a in (x.q, x.k, x.v))
    blocks = TritonForward(16, 16, 4, 2, overlap=overlap)
    how = dict(blocks=blocks, softcap=softcap)
    forward = functools.partial(triton.forward, **how)
    compare(forward, q, k, v, x.mask, atol=1e-2)
    out, lse = forward(q, k, v, x.mask, interpret=True)
    sizes = TritonBackward(16, 16, 4, 2, 16, 16, 4, 2, last_first=overlap)
    backward = functools.partial(triton.backward, blocks=sizes, softcap=softcap)
    compare(backward, q, k, v, x.mask, out, lse, out, jnp.ones_like(lse), atol=2e-2)
    if softcap is None and not overlap:
        compare(functools.partial(triton.largest, blocks=blocks), q, k, x.mask, atol=1e-3)


def test_recurrences(numpy_for_triton):
    B, T, G, H, K, V = 1, 70, 1, 2, 64, 64
    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)  # noqa: E731
    q, k, v = (
        draw(n, B, T, *size).astype(jnp.bfloat16) / 8
        for n, size in enumerate([(G, K), (G, K), (H, V)])
    )
    decay, rate = -jnp.exp(draw(3, B, T, H)), jax.nn.sigmoid(draw(4, B, T, H))
    begins, state = jnp.arange(T)[None] == 40, draw(5, B, H, K, V)

    def both(q, k, v, decay, rate, state, interpret):
        rule = lambda *a: recurrence.delta_rule(*a[:5], begins, a[5], 32, interpret)  # noqa: E731
        found, pull = jax.vjp(rule, q, k, v, decay, rate, state)
        return found, pull(jax.tree.map(jnp.ones_like, found))

    compare(both, q, k, v, decay, rate, state, atol=2e-2)


def test_the_largest(numpy_for_triton):
    x = jnp.round(4 * jax.random.normal(jax.random.key(0), (4, 48)))
    compare(functools.partial(by_kernel, columns=16, k=5), x, atol=0)


def run(kernel):
    x = jnp.ones((128,), jnp.float32)
    how = dict(programs=1, warps=4, stages=1, name="kernel", interpret=False)
    with compiling_for(HOPPER):
        return compiler.launch(kernel, [x], [(x.shape, x.dtype)], **how)


def test_what_has_no_source_is_named():
    def kernel(x, y):
        y[...] = lax.erf(x[...])

    with pytest.raises(NotImplementedError, match="a Triton kernel uses erf, for which"):
        run(kernel)


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)

    def kernel(x, y):
        y[...] = x[...]

    with pytest.raises(ImportError, match=r"kernel, a Triton kernel: jax_triton is not installed"):
        run(kernel)
    assert MISSING.endswith("pip install 'jaxpar[triton]'")
