"""Chooses the kernels of recurrent layers, and tests them on this device before the first step.

As with attention (`attention.py`), a wrong kernel raises no error. A few chunks of one key
head of the model's widths, with documents that begin anywhere, run through the kernels, forward and
backward, and through the reference in float32.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.components.recurrent import Recurrent
from jaxpar.config import Config, ConfigError
from jaxpar.kernels import recurrence
from jaxpar.kernels.recurrence import Shape
from jaxpar.step.compiled import FirstRunAlone
from jaxpar.training.selftests.experts import relative

#: Chunks in the test, and tokens that the last one lacks.
CHUNKS, LACKING = 6, 5

#: Value heads that share the key head, at most.
HEADS = 2

#: Maximum relative error of an array, L2: five times the error of rounding to bfloat16.
BOUND = 2e-2

NAMES = ("out", "last", "dq", "dk", "dv", "d_log_decay", "d_rate", "d_state")

PATH = "compute.recurrent_backend"

#: The program runs once. Autotuning it would take longer than the rest of the test.
_QUICKLY = {"xla_gpu_autotune_level": 0}


class RecurrenceInputs(NamedTuple):
    """The arguments of a recurrence, and weights of its results: their gradients."""

    q: jax.Array
    k: jax.Array
    """[B, T, G, K], keys of length 1, and queries as long as keys."""
    v: jax.Array
    """[B, T, H, V]."""
    log_decay: jax.Array
    rate: jax.Array
    """float32 [B, T, H]."""
    begins: jax.Array
    """bool [B, T]."""
    state: jax.Array
    d_last: jax.Array
    """float32 [B, H, K, V]."""
    d_out: jax.Array
    """float32 [B, T, H, V]."""


def draw(key: jax.Array, B: int, T: int, G: int, H: int, shape: Shape, documents: float):
    """Draw inputs: decays of 0.9 to 0.999 a token, rates around 1/2.

    Args:     documents: share of tokens that begin one.
    """
    keys = iter(jax.random.split(key, 9))
    normal = lambda *size: jax.random.normal(next(keys), size, jnp.float32)  # noqa: E731
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    q, k = (unit(normal(B, T, G, shape.K)).astype(shape.dtype) for _ in "qk")
    v = normal(B, T, H, shape.V).astype(shape.dtype)
    log_decay = -jnp.exp(jax.random.uniform(next(keys), (B, T, H), minval=-7.0, maxval=-2.3))
    rate = jax.nn.sigmoid(normal(B, T, H))
    begins = jax.random.bernoulli(next(keys), documents, (B, T))
    state, d_last = (0.1 * normal(B, H, shape.K, shape.V) for _ in range(2))
    return RecurrenceInputs(
        q, k, v, log_decay, rate, begins, state, d_last, normal(B, T, H, shape.V)
    )


def with_gradients(delta: bool, size: int, backend: str, x: RecurrenceInputs) -> list[jax.Array]:
    """Return NAMES, without a gradient of the rate for a state space.

    Args:     delta: the gated delta rule, or a state space. size: tokens of a chunk.
    """
    rule: Callable[..., Any] = recurrence.delta_rule if delta else recurrence.state_space
    arrays = [x.q, x.k, x.v, x.log_decay, *([x.rate] if delta else [])]

    def run(*arrays):
        return rule(*arrays[:-1], x.begins, arrays[-1], size, backend)

    found, pullback = jax.vjp(run, *arrays, x.state)
    return [*found, *pullback((x.d_out, x.d_last))]


def recurrences(cfg: Config) -> dict[Recurrent, Shape]:
    """Return the different recurrences of a model, with what a backend of each must support."""
    mixers = (layer.mixer for layer in cfg.model.layers)
    kinds = dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, Recurrent))
    return {mixer: Shape(mixer.chunk, *mixer.state[1:], cfg.compute.dtype) for mixer in kinds}


def backends_of(cfg: Config) -> dict[Recurrent, str]:
    """Return the backend of each recurrence of the model.

    Raises:   ConfigError when the kernels that are asked for by name cannot compute a recurrence on
              this device.
    """
    named = cfg.compute.recurrent_backend
    # Those without kernels are computed by plain JAX.
    asked = lambda mixer: named if mixer.has_kernels else "reference"  # noqa: E731
    try:
        return {
            mixer: recurrence.choose(asked(mixer), shape)
            for mixer, shape in recurrences(cfg).items()
        }
    except ValueError as error:
        fix = "use --compute.recurrent-backend auto"
        raise ConfigError(PATH, named, str(error), fix) from error


def test_recurrences(cfg: Config, log: Callable[[str], None]) -> dict[str, float]:
    """Compare the kernels of the model's recurrences with the reference.

    Returns:  the error of each array; {} without kernels.
    Raises:   ConfigError when they disagree, and as `backends_of`.
    """
    shapes, errors = recurrences(cfg), dict[str, float]()
    for mixer, backend in backends_of(cfg).items():
        name, shape = mixer.title, shapes[mixer]
        if not mixer.has_kernels:
            log(f"kernels of {name}: reference (decays of each channel have no others)")
        elif backend == "reference":
            why = recurrence.refusal(shape) or "no measurement on this kind of GPU"
            named = (
                "as configured"
                if cfg.compute.recurrent_backend == backend
                else f"not triton: {why}"
            )
            log(f"kernels of {name}: reference ({named})")
        else:
            found = _test(mixer.is_delta_rule, name, shape, cfg, log)
            errors |= {f"{what} of {name}": error for what, error in found.items()}
    return errors


def _test(
    delta: bool, name: str, shape: Shape, cfg: Config, log: Callable[[str], None]
) -> dict[str, float]:
    began = time.perf_counter()
    errors = errors_of(delta, shape, "triton", cfg.train.seed)
    # `not <=` rather than `>`: a NaN is wrong, too.
    wrong = [f"{what} is off by {e:.1e}" for what, e in errors.items() if not e <= BOUND]
    if wrong:
        device = jax.local_devices()[0].device_kind
        rule = f"the kernels of {name} disagree with the reference on {device}: {', '.join(wrong)}"
        fix = "use --compute.recurrent-backend reference, and report the bug"
        raise ConfigError(PATH, cfg.compute.recurrent_backend, rule, fix)
    found = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
    seconds = time.perf_counter() - began
    log(f"kernels of {name}: triton; self-test, error: {found}, {seconds:.1f} s")
    return errors


def errors_of(delta: bool, shape: Shape, backend: str, seed: int) -> dict[str, float]:
    """Return the relative error of a backend's results and gradients, by name."""
    size = 1, CHUNKS * shape.C - LACKING, 1, HEADS
    documents = 1 / (2 * shape.C)
    make = jax.jit(lambda key: draw(key, *size, shape, documents), compiler_options=_QUICKLY)
    x = make(jax.device_put(jax.random.key(seed), jax.local_devices()[0]))
    exact = x._replace(**{name: getattr(x, name).astype(jnp.float32) for name in "qkv"})
    found, wanted = _run(delta, shape.C, backend, x), _run(delta, shape.C, "reference", exact)
    names = [name for name in NAMES if delta or name != "d_rate"]
    errors = jax.jit(lambda a, b: [relative(*pair) for pair in zip(a, b, strict=True)])
    return dict(zip(names, map(float, errors(found, wanted)), strict=True))


def _run(delta: bool, size: int, backend: str, x: RecurrenceInputs) -> list[jax.Array]:
    run = functools.partial(with_gradients, delta, size, backend)
    with jax.default_matmul_precision("highest"):  # float32, not TF32
        return FirstRunAlone(jax.jit(run, compiler_options=_QUICKLY))(x)
