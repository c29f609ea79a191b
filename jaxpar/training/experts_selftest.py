"""Tests the kernels of experts on this device once, before the first step.

As with attention (`attention_selftest.py`), a wrong kernel raises no error. A few experts of the
model's widths, with uneven loads and one without tokens, run through the kernels, forward and
backward, and through the reference in float32.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import Config, ConfigError
from jaxpar.execution.decisions import Execution
from jaxpar.kernels import grouped_matmul as kernels
from jaxpar.kernels.grouped_matmul.capability import refusal_in_float8
from jaxpar.model.moe import experts
from jaxpar.step.compiled import FirstRunAlone

#: Tokens, and experts at most: one tile of rows for most experts, several for the first.
TOKENS, EXPERTS = 512, 8

#: Maximum relative error of an array, L2: five times the error of rounding to bfloat16. In float8,
#: such an error moves some numbers across a boundary between two 8-bit numbers.
BOUND, BOUND_FLOAT8 = 2e-2, 6e-2

NAMES = ("out", "dx", "d_weights", "d_gate", "d_up", "d_down")
OF_BIASES = ("d_gate_bias", "d_up_bias")

#: The program runs once. Autotuning it would take longer than the rest of the test.
_QUICKLY = {"xla_gpu_autotune_level": 0}


def test_experts(ex: Execution, log: Callable[[str], None]) -> None:
    """Compare the kernels of experts with the reference, if the model has experts.

    Raises:   ConfigError when they disagree.
    """
    cfg, m = ex.cfg, ex.cfg.model
    if not m.num_experts:
        return
    D, F = m.d_model, m.d_ff // cfg.parallel.tensor
    why = kernels.refusal(D, F, m.dtype)
    if why is not None:
        log(f"expert kernels: reference (not hopper: {why})")
        return
    began = time.perf_counter()
    errors = errors_of(cfg, 1 if ex.gathers_per_layer else 0)
    # `not <=` rather than `>`: a NaN is wrong, too.
    bound = BOUND if m.matmul_dtype == "compute" else BOUND_FLOAT8
    wrong = [f"{name} is off by {e:.1e}" for name, e in errors.items() if not e <= bound]
    if wrong:
        device = jax.local_devices()[0].device_kind
        rule = f"its kernels disagree with the reference on {device}: {', '.join(wrong)}"
        fix = "use --model.dtype float32, which runs the reference, and report the bug"
        raise ConfigError("model.num_experts", m.num_experts, rule, fix)
    found = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    log(f"expert kernels: hopper; self-test: {found}, {time.perf_counter() - began:.1f} s")
    why = refusal_in_float8(D, F, m.dtype) or refusal_in_float8(F, D, m.dtype)
    if m.matmul_dtype == "float8" and why is not None:
        log(f"products of experts in float8: reference (not hopper: {why})")


def errors_of(cfg: Config, expert_dim: int) -> dict[str, float]:
    """Return the relative error of the output and of each gradient, by name."""
    m, rng = cfg.model, np.random.default_rng(cfg.train.seed)
    E, D, F = min(m.num_experts, EXPERTS), m.d_model, m.d_ff // cfg.parallel.tensor
    k = min(m.experts_per_token, max(E - 1, 1))
    draw = lambda *shape, size=1.0: (rng.normal(size=shape) * size).astype(np.float32)  # noqa: E731
    # No value is near a limit, where rounding decides whether it has a gradient. Biases move some
    # columns far beyond.
    clamped = m.activation == "clamped_swiglu"
    wide = m.swiglu_limit / 8 if clamped else 1.0
    matrices = [draw(E, D, F, size=wide * D**-0.5) for _ in "gu"] + [draw(E, F, D, size=F**-0.5)]
    share = np.append(1 / np.arange(1, E) ** 2, 0) if E > 1 else np.ones(1)
    chosen = [rng.choice(E, k, replace=False, p=share / share.sum()) for _ in range(TOKENS)]
    biases = [draw(E, F, size=wide) for _ in OF_BIASES] if m.expert_bias else []
    for bias in biases if clamped else ():
        bias[:, ::8] = np.copysign(3 * m.swiglu_limit, bias[:, ::8])
    arrays = draw(TOKENS, D), np.abs(draw(TOKENS, k)), (matrices, biases), draw(TOKENS, D)
    on_device = jax.device_put((arrays, np.array(chosen, np.int32)), jax.local_devices()[0])
    (x, weights, (w, b), d_out), experts_of = on_device

    def run(expert_dim: int, to: Callable[[jax.Array], jax.Array]) -> list[np.ndarray]:
        how = experts.products_of(m, expert_dim)
        x_w_d = jax.tree.map(to, (x, w, d_out))
        return _run(how, E, x_w_d, (weights, b), experts_of)

    found = run(expert_dim, lambda a: a.astype(m.dtype))
    wanted = run(0, lambda a: a.astype(m.dtype).astype(jnp.float32))
    names = NAMES + (OF_BIASES if m.expert_bias else ())
    return {name: _relative(a, b) for name, a, b in zip(names, found, wanted, strict=True)}


def _run(how: experts.Products, E: int, arrays, wide, chosen) -> list[np.ndarray]:
    program = jax.jit(functools.partial(_every_array, how, E), compiler_options=_QUICKLY)
    found = jax.device_get(FirstRunAlone(program)(arrays, wide, chosen))
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(found)]


def _every_array(how: experts.Products, E: int, arrays, wide, chosen):
    (x, w, d_out), (weights, biases) = arrays, wide
    tile = kernels.tile_rows(w[0].shape[1], w[0].shape[2], x.dtype)
    plan = experts.plan_rows(chosen, E, tile)

    def layer(x, weights, w, biases):
        if how.expert_dim == 1:
            w = [jnp.moveaxis(a, dim, 0) for a, dim in zip(w, (1, 1, 2), strict=True)]
        of_experts = experts.ExpertWeights(*how.matrices(tuple(w)), *biases)
        return experts.of_rows(how, x, weights, of_experts, plan)

    with jax.default_matmul_precision("highest"):  # float32, not TF32
        out, pullback = jax.vjp(layer, x, weights, w, biases)
        return out, *pullback(d_out)


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))
