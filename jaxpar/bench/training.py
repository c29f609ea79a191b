"""Measure training speed: python -m jaxpar.bench train CONFIG [--steps N] [--card FILE] [...]

Runs the training program's own step on its own data, without checkpoints or evaluation, and writes
a card: the figures with the conditions they hold under.
"""

import argparse
import dataclasses
import hashlib
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxpar import cli, runtime
from jaxpar.bench import conditions
from jaxpar.config import Config, ConfigError, to_json
from jaxpar.metrics import peak_memory_gib
from jaxpar.model.flops import mfu, num_params
from jaxpar.parallel.mesh import describe
from jaxpar.train import Run, compiled

#: Steps run before the clock starts: the first ones load kernels and settle the clocks.
WARM_UP = 3


def measure(run: Run, steps: int) -> dict[str, Any]:
    """Time the train step on consecutive batches.

    Each step is waited for once the next is dispatched, as in training.

    Returns:  median, fastest and slowest step in seconds; compile seconds; first and last loss.
    """
    state = run.start()
    began = time.perf_counter()
    train_step = compiled(run, state)
    compile_seconds = time.perf_counter() - began
    times, losses, pending = [], [], None
    batches = run.loader.prefetched(0)
    for _, batch in (next(batches) for _ in range(WARM_UP + steps + 1)):
        state, measured = train_step(state, batch)
        if pending is not None:
            losses.append(float(pending.loss))
            times.append(time.perf_counter())
        pending = measured
    batches.close()
    seconds = [b - a for a, b in itertools.pairwise(times)][WARM_UP - 1 :]
    return {
        "step_seconds": {
            "median": statistics.median(seconds),
            "fastest": min(seconds),
            "slowest": max(seconds),
        },
        "steps": len(seconds),
        "compile_seconds": compile_seconds,
        "loss": {"first": losses[0], "last": losses[-1]},
    }


def card(run: Run, measured: dict[str, Any], environment: list[str], commit: str) -> dict[str, Any]:
    """The figures with everything they depend on."""
    cfg, devices = run.cfg, jax.device_count()
    tokens = cfg.train.global_batch_size * cfg.data.seq_len
    rate = tokens / measured["step_seconds"]["median"] / devices
    share = lambda causal: mfu(  # noqa: E731
        rate, cfg.model, cfg.data.seq_len, jax.devices()[0].device_kind, causal=causal
    )
    return {
        "tokens_per_second_per_device": rate,
        "mfu_causal": share(True),
        "mfu_full_attention": share(False),
        "peak_memory_gib": peak_memory_gib(),
        **measured,
        "parameters": num_params(cfg.model),
        "mesh": describe(run.mesh),
        "attention": run.attention,
        **conditions.of_this_process(environment, commit),
        "config_sha256": hashlib.sha256(to_json(cfg).encode()).hexdigest(),
        "config": dataclasses.asdict(cfg),
    }


def summary(result: dict[str, Any]) -> str:
    """The card in one line."""
    seconds = result["step_seconds"]
    parts = [
        f"{result['tokens_per_second_per_device']:,.0f} tokens/s/device",
        f"step {seconds['median'] * 1e3:.1f} ms "
        f"({seconds['fastest'] * 1e3:.1f} to {seconds['slowest'] * 1e3:.1f})",
        f"peak {result['peak_memory_gib']:.1f} GiB",
        f"loss {result['loss']['first']:.4f} to {result['loss']['last']:.4f}",
    ]
    if result["mfu_causal"] is not None:
        mfus = f"MFU {result['mfu_causal']:.1%} causal, {result['mfu_full_attention']:.1%} full"
        parts.insert(1, mfus)
    return "   ".join(parts)


def read_command(argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """The options of the benchmark itself, and the config with its overrides."""
    parser = argparse.ArgumentParser(prog="python -m jaxpar.bench train", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps to time (20)")
    parser.add_argument("--card", help="file to write the card to, as JSON")
    parser.add_argument("--commit", help="commit to put on the card, where there is no checkout")
    options, rest = parser.parse_known_args(argv)
    if options.steps < 1:
        raise ConfigError("--steps", options.steps, "must be at least 1", "use --steps 20")
    return options, cli.read_config(rest, "jaxpar.bench train", __doc__)


def main(argv: Sequence[str]) -> int:
    """The command line."""
    options, cfg = read_command(argv)
    environment = runtime.start(cfg.run)
    cfg = dataclasses.replace(
        cfg,
        checkpoint=dataclasses.replace(cfg.checkpoint, every=0, resume="auto"),
        evaluation=dataclasses.replace(cfg.evaluation, every=0),
        run=dataclasses.replace(cfg.run, dir="runs/bench"),
    )
    run = Run(cfg)
    commit = options.commit or conditions.checked_out_commit()
    result = card(run, measure(run, options.steps), environment, commit)
    print(summary(result), flush=True)
    if options.card:
        conditions.write_json(options.card, result)
    return 0
