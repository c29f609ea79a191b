"""Times flash-linear-attention's kernels on one problem: a program of its own, with PyTorch.

Reads the problem from standard input as JSON, and writes a line of JSON for each direction once it
is measured, since fla's compiler may not end for the next one: `ms`, launches from Python back to
back, and `kernel_ms`, the sum of the kernels' durations. It imports nothing of jaxpar, so that a
Python with PyTorch and fla can run this file alone.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import fla
import torch

#: Duration of a batch of launches, as in `bench/timing.py`.
BATCH_SECONDS = 0.03


def main() -> None:
    """Time the problem on standard input."""
    problem = json.load(sys.stdin)
    shared, weights = inputs(problem)
    arrays = repeated(shared, problem["H"] // problem["G"])
    keys = "repeated"
    if share_keys(problem, shared, arrays):
        arrays, keys = shared, "shared"
    versions = {"fla": fla.__version__, "torch": torch.__version__, "keys": keys}
    for direction, launch in launches(problem, arrays, weights).items():
        ms = median(launch, problem["repeats"])
        found = {"direction": direction, "ms": ms, "kernel_ms": kernel_ms(launch)}
        print(json.dumps(found | versions), flush=True)


def inputs(p: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Draw queries, keys, values, decays, rates and states, and gradients of the results."""
    torch.manual_seed(0)
    B, T, G, H, K, V = (p[name] for name in "BTGHKV")
    normal = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    dtype = getattr(torch, p["dtype"])
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1).to(dtype)  # noqa: E731
    arrays = {
        "q": unit(normal(B, T, G, K)),
        "k": unit(normal(B, T, G, K)),
        "v": normal(B, T, H, V).to(dtype),
        "g": -torch.exp(torch.empty(B, T, H, device="cuda").uniform_(-7.0, -2.3)),
    }
    if p["rule"] == "delta_rule":
        arrays["beta"] = torch.sigmoid(normal(B, T, H))
    arrays["initial_state"] = 0.1 * normal(B, H, K, V)
    for array in arrays.values():
        array.requires_grad_(True)
    return arrays, [normal(B, T, H, V).to(dtype), 0.1 * normal(B, H, K, V)]


def repeated(arrays: dict[str, Any], times_: int) -> dict[str, Any]:
    """Return inputs with a query and a key for each head."""
    wide = {name: arrays[name].detach().repeat_interleave(times_, dim=2) for name in "qk"}
    return arrays | {name: a.requires_grad_(True) for name, a in wide.items()}


def share_keys(p: dict[str, Any], shared: dict[str, Any], arrays: dict[str, Any]) -> bool:
    """Return whether this version computes the same with queries and keys that heads share.

    A version that knows only equal numbers of heads may give a wrong result without an error.
    """
    with torch.no_grad():
        wanted = rule_of(p)(**arrays, scale=1.0, output_final_state=True)[0]
        try:
            found = rule_of(p)(**shared, scale=1.0, output_final_state=True)[0]
        except Exception:
            return False
    return found.shape == wanted.shape and bool(torch.allclose(found, wanted, atol=1e-2))


def rule_of(p: dict[str, Any]) -> Callable[..., Any]:
    """Return fla's function."""
    if p["rule"] == "delta_rule":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla


def launches(p: dict[str, Any], arrays: dict[str, Any], weights: list[Any]):
    """Return the forward, and forward and backward, as functions without arguments."""
    rule = rule_of(p)

    def run():
        return rule(**arrays, scale=1.0, output_final_state=True)

    def forward():
        with torch.no_grad():
            return run()

    def both():
        return torch.autograd.grad(run(), list(arrays.values()), weights)

    return {"forward": forward, "both": both}


def median(launch: Callable[[], Any], repeats: int) -> float:
    """Return the median milliseconds per launch, over batches of back-to-back launches."""
    for _ in range(3):
        once = batch(launch, 5)
    count = max(round(BATCH_SECONDS / once), 1)
    return 1e3 * statistics.median(batch(launch, count) for _ in range(repeats))


def kernel_ms(launch: Callable[[], Any], count: int = 10) -> float:
    """Return the milliseconds of a launch's kernels, without the time in which the GPU waits."""
    kind = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(count):
            launch()
        torch.cuda.synchronize()
    micros = sum(event.self_device_time_total for event in profile.key_averages())
    return micros / count / 1e3


def batch(launch: Callable[[], Any], count: int) -> float:
    """Return the seconds per launch."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        launch()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main()
