"""Measure one layer's experts on an expert axis: python scripts/measure/expert_layer.py [--gpus N]

The forward, and the forward with the backward, of the experts of one layer of CONFIG: router, plan,
dispatch, products, and the weights' conversion to the compute dtype. One layer alone has nothing to
hide its communication behind. Weights are fresh and inputs are normal numbers, so loads are nearly
even; the fullest device's share is printed. Runs at the power limit.
"""

import argparse
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.config import Config, replace
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from jaxpar.execution.decisions import execution_of
from jaxpar.kernels.norm import NormOutput
from jaxpar.model.attention_context import AttentionContext
from jaxpar.model.layer import branches
from jaxpar.model.moe import router
from jaxpar.model.parameters import param_specs
from jaxpar.runtime.program import run_program
from jaxpar.runtime.start import start
from jaxpar.sharding.axes import BATCH_SPEC, EXPERT, partition_spec
from jaxpar.sharding.mesh import make_mesh, shardings
from scripts.measure.interleaved import Sustained, Timing, time_interleaved


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="qwen3_30b_a3b")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="sequences per GPU")
    parser.add_argument("--dispatch", nargs="+", default=["tokens", "rows"])
    parser.add_argument("--slack", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a timed batch")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    cfg = _config(given)
    start(cfg)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {given}")
    programs = {}
    for dispatch in given.dispatch:
        of = replace(cfg, **{"parallel.expert_dispatch": dispatch})
        forward, both, share = programs_of(of)
        programs |= {f"{dispatch}, forward": forward, f"{dispatch}, forward and backward": both}
        print(f"{dispatch}: the fullest device has {share:.3f} times its share")
    held = Sustained(settle=given.seconds, timed=given.seconds)
    for name, found in time_interleaved(programs, given.repeats, held).items():
        if not isinstance(found, Timing):
            raise found
        print(f"{name:30} {found.ms:7.2f} ms ({found.fastest:.2f} to {found.slowest:.2f})")


def _config(given: argparse.Namespace) -> Config:
    mesh = {"parallel.expert": given.gpus, "parallel.data": 1, "parallel.expert_slack": given.slack}
    rows = {"train.global_batch_size": given.gpus * given.rows}
    return resolve(replace(load_config(given.config), **mesh, **rows), given.gpus)


def programs_of(cfg: Config):
    """Return the forward, the forward with the backward, and the fullest device's share."""
    mesh, ex, m = make_mesh(cfg.parallel), execution_of(cfg), cfg.model
    layer = m.layers[-1]
    routed = layer.feed_forward
    specs = {n: s for n, s in param_specs(m)[layer.name].items() if n in routed.weights(m)}
    # Only experts are sharded. FSDP would gather the others, a layer ahead.
    of_weights = {
        n: partition_spec(s.axes[1:]) if "experts" in s.axes else PartitionSpec()
        for n, s in specs.items()
    }
    made = functools.partial(_arrays, specs, cfg)
    placed = shardings(mesh, (of_weights, BATCH_SPEC, BATCH_SPEC))
    w, x, d_out = jax.jit(made, out_shardings=placed)(jax.random.key(0))
    context = AttentionContext(mask=None, rope=None, of=layer)  # type: ignore[arg-type]

    def converted(w):
        return {
            n: a if n in ("router", "b_router", "router_bias") else a.astype(cfg.compute.dtype)
            for n, a in w.items()
        }

    def apply(w, x):
        branch = branches(layer, m)[-1]
        h = branch.receive(NormOutput(x), w, branch.norm, context, ex)
        return branch.send(branch.function(h, w, context, ex))

    def gradients(w, x, d_out):  # those of experts stay in the compute dtype, as in a step
        out, pullback = jax.vjp(apply, converted(w), x)
        return out, *pullback(d_out)

    def load(w, x):
        each = routed.num_experts // cfg.parallel.expert
        ids = router.route(x, w, routed).experts // each
        return lax.psum(jnp.bincount(ids.reshape(-1), length=cfg.parallel.expert), EXPERT)

    def over(fn, inputs, outputs):
        sharded = jax.shard_map(fn, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(sharded)

    of_gradients = (BATCH_SPEC, of_weights, BATCH_SPEC)
    forward = over(lambda w, x: apply(converted(w), x), (of_weights, BATCH_SPEC), BATCH_SPEC)
    both = over(gradients, (of_weights, BATCH_SPEC, BATCH_SPEC), of_gradients)
    counts = over(load, (of_weights, BATCH_SPEC), PartitionSpec())(w, x)
    share = float(counts.max() / counts.mean())
    return functools.partial(forward, w, x), functools.partial(both, w, x, d_out), share


def _arrays(specs: dict, cfg: Config, key: jax.Array):
    """Draw the weights in float32, and tokens and gradients in the compute dtype."""
    keys = iter(jax.random.split(key, len(specs) + 2))
    shape = (cfg.train.global_batch_size, cfg.data.seq_len, cfg.model.d_model)
    draw = lambda s: s.std * jax.random.normal(next(keys), s.shape[1:], jnp.float32)  # noqa: E731
    w = {n: draw(s) for n, s in specs.items()}
    x, d_out = (jax.random.normal(next(keys), shape, cfg.compute.dtype) for _ in range(2))
    return w, x, d_out


if __name__ == "__main__":
    run_program(main)
