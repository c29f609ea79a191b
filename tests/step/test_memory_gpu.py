"""Peaks of memory on a GPU, each measured in a process of its own: python -m pytest -m gpu.

What saves memory must change nothing else. So that bits can be compared, the processes run without
autotuning and with XLA's deterministic kernels; but for unrolled layers with values in host memory,
which XLA's runtime does not take together with the latter. The embedding's gradient alone, a sum in
any order, then differs from run to run.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar.config import Attention, Config, Glu, Layer, Model, replace
from jaxpar.config.serialize import from_json, to_json

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

ATTENTION = Attention(num_heads=16, num_kv_heads=8, head_dim=64)

#: On one GPU; about 150 million parameters and 32,768 tokens.
BASE = replace(
    Config(),
    **{
        "model": Model(
            d_model=1024,
            vocab_size=8192,
            layers=[Layer("layers", ATTENTION, Glu(4096))] * 8,
        ),
        "compute.attention_deterministic": True,
        "data.seq_len": 4096,
        "train.global_batch_size": 8,
        "optimizer.warmup_steps": 0,
        "parallel.data": 1,
        "parallel.remat": "attn_out",
    },
)

STEPS = 3

#: The parent's own JAX may hold most of the GPU.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(ROOT)}

UNTUNED = "--xla_gpu_autotune_level=0"
DETERMINISTIC = f"{UNTUNED} --xla_gpu_deterministic_ops=true"


@functools.cache
def measured(flags: str = DETERMINISTIC, **fields: Any) -> dict[str, Any]:
    """Peaks in bytes, losses and digests of gradients, of some steps under the changed config."""
    child = subprocess.run(
        [sys.executable, __file__],
        input=to_json(replace(BASE, **fields)),
        env=os.environ | ENVIRONMENT | {"XLA_FLAGS": flags},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


def offloaded_bytes() -> int:
    """layer_input and attn_out of every layer, in bfloat16."""
    m, tokens = BASE.model, BASE.train.global_batch_size * BASE.data.seq_len
    return 2 * tokens * m.num_layers * (m.d_model + ATTENTION.num_heads * ATTENTION.head_dim)


def test_offloaded_activations_lower_the_peak_and_keep_every_bit():
    """Two layers' values at most are on the device, of eight."""
    here, there = measured(), measured(**{"parallel.remat": "offload"})
    assert there["gradients"] == here["gradients"]
    assert there["losses"] == here["losses"]
    assert here["peak"] - there["peak"] > 0.6 * offloaded_bytes()


def test_offloaded_activations_of_unrolled_layers_do_so_too():
    """Three layers' at most: the last layer's stay.

    The embedding's gradient is summed in no fixed order. The head's is of the final norm, which XLA
    computes again in a fusion of its own choice: its last bit may differ between two programs.
    """
    layers = {"parallel.layer_loop": "unroll"}
    here = measured(UNTUNED, **layers)
    there = measured(UNTUNED, **layers, **{"parallel.remat": "offload"})
    in_order = set(here["gradients"]) - {"embed", "head"}
    differing = {n for n in in_order if there["gradients"][n] != here["gradients"][n]}
    assert len(in_order) > 5 and not differing
    assert there["losses"][0] == here["losses"][0]
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-4)
    assert here["peak"] - there["peak"] > 0.5 * offloaded_bytes()


def test_offloaded_moments_leave_the_device_and_change_nothing_else():
    here, there = measured(), measured(**{"optimizer.offload": True})
    moments = 8 * here["parameters"]
    assert here["peak"] - there["peak"] > 0.8 * moments
    assert there["gradients"] == here["gradients"]
    assert there["losses"][0] == here["losses"][0]
    # The update is compiled into another loop, where a product and a sum may be rounded once.
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-4)


def test_bfloat16_moments_have_half_the_bytes():
    kept = {"optimizer.first_moment_dtype": "bfloat16", "optimizer.second_moment_dtype": "bfloat16"}
    here, there = measured(), measured(**kept)
    assert here["state"] - there["state"] == 4 * here["parameters"]
    assert here["peak"] - there["peak"] > 0.8 * 4 * here["parameters"]
    assert there["losses"][:2] == here["losses"][:2]  # the first update does not see the rounding
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-2)


def test_the_step_takes_over_the_state():
    for fields in ({}, {"optimizer.offload": True}):
        result = measured(**fields)
        assert result["taken over"] == result["state"]
        assert result["peak"] < result["planned"] + (512 << 20)


def test_the_state_is_made_without_much_beside_it():
    """The peak after `init_state`, before any step."""
    result = measured()
    assert result["peak at init"] < 1.05 * result["state"] + (64 << 20)


# ------------------------------------------------------------- the process that is measured


def digest(array: Any) -> str:
    import numpy as np

    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16]


def main() -> None:
    """Read a config from standard input, run it, and print what was measured."""
    import jax

    from jaxpar.config.validate import resolve
    from jaxpar.model.flops import num_params
    from jaxpar.sharding.axes import BATCH_SPEC
    from jaxpar.sharding.mesh import make_mesh
    from jaxpar.sharding.params import flat
    from jaxpar.step.state import bytes_per_device, init_state
    from jaxpar.step.train_step import make_gradient_step, make_train_step
    from tests.step.test_step_gpu import random_batch

    device = jax.devices()[0]
    peak = lambda: device.memory_stats()["peak_bytes_in_use"]  # noqa: E731
    cfg = resolve(from_json(sys.stdin.read()), 1)
    mesh = make_mesh(cfg.parallel, [device])
    state = jax.block_until_ready(init_state(cfg, mesh))
    result = {"peak at init": peak(), "state": bytes_per_device(state)}
    batch = jax.device_put(random_batch(cfg), jax.NamedSharding(mesh, BATCH_SPEC))

    program = make_train_step(cfg, mesh, 1).lower(state, batch).compile()
    memory = program.memory_analysis()
    result["taken over"] = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    result["planned"] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    result["losses"] = []
    for _ in range(STEPS):
        state, at_step = program(state, batch)
        result["losses"].append(float(at_step["loss"]))
    result |= {"peak": peak(), "parameters": num_params(cfg.model)}

    del state, program
    params = init_state(cfg, mesh).params
    _, grads = make_gradient_step(cfg, mesh, 1)(params, batch)
    result["gradients"] = {name: digest(a) for name, a in flat(grads).items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
