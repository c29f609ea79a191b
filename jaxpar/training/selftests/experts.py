"""Tests the kernels of experts on this device once, before the first step.

As with attention (`attention.py`), a wrong kernel raises no error. A few experts of the
model's widths, with uneven loads and one without tokens, run through the kernels, forward and
backward, and through the reference in float32. In float8, where rounding to 8 bits is most of the
error, the reference runs in float8, too, and its error is subtracted.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.components.experts import Experts, experts_in
from jaxpar.components.feed_forward import ClampedSwiglu
from jaxpar.config import ComputeConfig, Config, ConfigError, Model
from jaxpar.config.layout.placement import expert_ways
from jaxpar.execution.decisions import Execution
from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.kernels.grouped_matmul.capability import refusal_in_float8
from jaxpar.model.moe import experts
from jaxpar.parallel.expert.plan import plan_tokens
from jaxpar.step.compiled import FirstRunAlone

#: Tokens, and experts at most: one tile of rows for most experts, several for the first.
TOKENS, EXPERTS = 512, 8

#: Maximum relative error of an array, L2: five times the error of rounding to bfloat16.
BOUND = 2e-2

NAMES = ("out", "dx", "d_weights", "d_gate", "d_up", "d_down")
WITHOUT_GATE = tuple(name for name in NAMES if name != "d_gate")
OF_BIASES = ("d_gate_bias", "d_up_bias")
type Arrays = dict[str, jax.Array]

#: The program runs once. Autotuning it would take longer than the rest of the test. Without excess
#: precision, XLA keeps the reference's roundings to 8 bits, which it then converts to float32.
_QUICKLY = {"xla_gpu_autotune_level": 0, "xla_allow_excess_precision": False}


def _experts(m: Model) -> Experts:
    """Return the experts of a model's first layer that has some."""
    return experts_in(m)[0]


def test_experts(ex: Execution, log: Callable[[str], None]) -> dict[str, float]:
    """Compare the kernels of experts with the reference, if the model has experts.

    Returns:  the error of each array; {} without kernels.
    Raises:   ConfigError when they disagree.
    """
    cfg, m, dtype = ex.cfg, ex.cfg.model, ex.cfg.compute.dtype
    if not experts_in(m):
        return {}
    of = _experts(m)
    D, F = m.d_model, of.expert.d_ff // cfg.parallel.tensor
    why = kernels.refusal(D, F, dtype)
    if why is not None:
        log(f"expert kernels: reference (not hopper: {why})")
        return {}
    began = time.perf_counter()
    errors = errors_of(cfg, 1 if ex.gathers_per_layer else 0)
    # `not <=` rather than `>`: a NaN is wrong, too.
    float8 = cfg.compute.matmul_dtype == "float8"
    beside = " beyond the reference in float8" if float8 else ""
    wrong = [f"{name} is off by {e:.1e}{beside}" for name, e in errors.items() if not e <= BOUND]
    if wrong:
        device = jax.local_devices()[0].device_kind
        rule = f"its kernels disagree with the reference on {device}: {', '.join(wrong)}"
        fix = "use --compute.dtype float32, which runs the reference, and report the bug"
        raise ConfigError("model.*.feed_forward.num_experts", of.num_experts, rule, fix)
    found = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    seconds = time.perf_counter() - began
    log(f"expert kernels: hopper; self-test, error{beside}: {found}, {seconds:.1f} s")
    why = refusal_in_float8(D, F, dtype) or refusal_in_float8(F, D, dtype)
    if float8 and why is not None:
        log(f"products of experts in float8: reference (not hopper: {why})")
    return errors


def errors_of(cfg: Config, expert_dim: int) -> dict[str, float]:
    """Return the relative error of the output and of each gradient, by name.

    With matmuls in float8, it is the error beyond the reference's in float8. Independent errors add
    up in squares. On an H100, with D 2048 and F 768, it was 2e-3 to 6e-3.
    """
    c, of = cfg.compute, _experts(cfg.model)
    E, expert = min(of.num_experts, EXPERTS), of.expert
    # As they arrive on an expert axis, where parts are equal.
    parts = math.gcd(expert_ways(cfg.parallel), TOKENS) if cfg.parallel.pipeline == 1 else 1
    draw = jax.jit(functools.partial(_inputs, cfg, E), compiler_options=_QUICKLY)
    key = jax.device_put(jax.random.key(cfg.train.seed), jax.local_devices()[0])
    (x, weights, (w, b), d_out), chosen = draw(key)

    def run(c: ComputeConfig, expert_dim: int, to: Callable[[jax.Array], jax.Array]) -> Arrays:
        how = experts.products_of(expert, c, expert_dim)
        x_w_d = jax.tree.map(to, (x, w, d_out))
        names = NAMES if len(expert.into) == 2 else WITHOUT_GATE
        names += OF_BIASES if expert.bias else ()
        found = _run(how, E, parts, x_w_d, (weights, b), chosen)
        return dict(zip(names, found, strict=True))

    in_float32 = lambda a: a.astype(c.dtype).astype(jnp.float32)  # noqa: E731
    exact = run(dataclasses.replace(c, matmul_dtype="compute"), 0, in_float32)
    errors = _errors(run(c, expert_dim, lambda a: a.astype(c.dtype)), exact)
    if c.matmul_dtype != "float8":
        return errors
    own = _errors(run(c, 0, in_float32), exact)
    return {name: _beyond(error, own[name]) for name, error in errors.items()}


def _inputs(cfg: Config, E: int, key: jax.Array):
    """Draw tokens, weights, matrices with biases and gradients, and each token's experts.

    On the device: a host is slow to draw the widest matrices (docs/experiments.md).
    """
    of, keys = _experts(cfg.model), iter(jax.random.split(key, 16))
    D, F = cfg.model.d_model, of.expert.d_ff // cfg.parallel.tensor
    k = min(of.experts_per_token, max(E - 1, 1))
    draw = lambda *shape, size=1.0: size * jax.random.normal(next(keys), shape, jnp.float32)  # noqa: E731
    # No value is near a limit, where rounding decides whether it has a gradient. Biases move some
    # columns far beyond.
    activation = of.expert.activation
    limit = activation.limit if isinstance(activation, ClampedSwiglu) else 0.0
    wide = limit / 8 or 1.0
    into = [draw(E, D, F, size=wide * D**-0.5) for _ in of.expert.into]
    matrices = [*into, draw(E, F, D, size=F**-0.5)]
    biases = [draw(E, F, size=wide) for _ in OF_BIASES] if of.expert.bias else []
    if limit:
        beyond = lambda bias: jnp.copysign(3 * limit, bias[:, ::8])  # noqa: E731
        biases = [bias.at[:, ::8].set(beyond(bias)) for bias in biases]
    # The k largest of noisy scores: expert n is drawn in proportion to 1/n^2, the last one never.
    scores = jnp.append(-2 * jnp.log(jnp.arange(1.0, E)), -jnp.inf) if E > 1 else jnp.zeros(1)
    noise = jax.random.gumbel(next(keys), (TOKENS, E))
    chosen = jax.lax.top_k(scores + noise, k)[1].astype(jnp.int32)
    arrays = draw(TOKENS, D), jnp.abs(draw(TOKENS, k)), (matrices, biases), draw(TOKENS, D)
    return arrays, chosen


def _run(how: experts.Products, E: int, parts: int, arrays, wide, chosen) -> list[jax.Array]:
    every = functools.partial(_every_array, how, E, parts)
    program = jax.jit(every, compiler_options=_QUICKLY)
    return jax.tree.leaves(FirstRunAlone(program)(arrays, wide, chosen))


def _every_array(how: experts.Products, E: int, parts: int, arrays, wide, chosen):
    (x, w, d_out), (weights, biases) = arrays, wide
    tile = kernels.tile_rows(w[0].shape[1], w[0].shape[2], x.dtype)
    plan = dataclasses.replace(plan_tokens(chosen, E, tile, slack=1.0), parts=parts)

    def layer(x, weights, w, biases):
        if how.expert_dim == 1:
            dims = (*(1,) * (len(w) - 1), 2)
            w = [jnp.moveaxis(a, dim, 0) for a, dim in zip(w, dims, strict=True)]
        gate = (None,) * (3 - len(w))
        of_experts = experts.ExpertWeights(*gate, *how.matrices(tuple(w)), *biases)
        sent = tuple(jnp.split(x, parts))
        return jnp.concatenate(experts.of_sent(how, True, sent, weights, of_experts, plan))

    with jax.default_matmul_precision("highest"):  # float32, not TF32
        out, pullback = jax.vjp(layer, x, weights, w, biases)
        return out, *pullback(d_out)


def _errors(found: Arrays, wanted: Arrays) -> dict[str, float]:
    errors = jax.jit(functools.partial(jax.tree.map, relative))(found, wanted)
    return {name: float(errors[name]) for name in wanted}  # jit sorts the names


def _beyond(error: float, own: float) -> float:
    """Return the part of an error that is not `own`. NaN if one of them is."""
    return math.sqrt(error**2 - own**2) if not error <= own else 0.0


def relative(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return |found - wanted| / |wanted|, in float32."""
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    norm = lambda a: jnp.sqrt(jnp.sum(a * a))  # noqa: E731
    return norm(found - wanted) / jnp.maximum(norm(wanted), 1e-30)
