"""Compare pipeline schedules: python scripts/measure/pipeline_schedules.py [--layers N] [...]

Times the train step of a pipeline of 2 stages with the layers of Llama 3 8B and a small vocabulary,
for several schedules and numbers of microbatches, on random tokens. All programs run in one process
and in turns, so that clocks and temperature are the same for all. For each schedule, a line through
the times, `step = a + b * microbatches`, separates the bubble (with the rest of what a step does
once) from the microbatches.

A schedule is NAME or NAME:VIRTUAL_STAGES, for example 1f1b, 1f1b:2 or gpipe.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpar.certification import traces
from jaxpar.config import (
    Attention,
    Config,
    ConfigError,
    DataConfig,
    Glu,
    Layer,
    Model,
    ParallelConfig,
    replace,
)
from jaxpar.config.validate import resolve
from jaxpar.runtime import provenance
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import outputs
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.program import run_program
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.compiled import FirstRunAlone
from jaxpar.step.state import init_state
from jaxpar.step.train_step import make_train_step
from jaxpar.tools.bench import conditions

#: The layers of Llama 3 8B (2407.21783), table 3. The vocabulary is small: every stage computes its
#: share of the head, so that a large one would only add to the slope.
LAYER = Layer("layers", Attention(num_heads=32, num_kv_heads=8, head_dim=128), Glu(14_336))
BASE = Config(
    model=Model(d_model=4096, vocab_size=16_384, layers=[LAYER] * 4),
    data=DataConfig(seq_len=8192, document_mask=False),
    parallel=ParallelConfig(
        pipeline=2, data=1, zero=1, remat="dots", layer_loop="unroll", loss_chunks=1
    ),
)
#: A few layers of a few units, to try the script without GPUs.
SMALL = {
    "model.d_model": 32,
    "model.layers.mixer": Attention(num_heads=2, num_kv_heads=2, head_dim=16),
    "model.layers.feed_forward": Glu(64),
    "model.vocab_size": 256,
    "data.seq_len": 32,
    "run.cpu_devices": 2,
}


def config_of(base: Config, schedule: str, microbatches: int) -> Config:
    """Return the config of a schedule, NAME or NAME:VIRTUAL_STAGES, with one sequence each."""
    name, _, virtual = schedule.partition(":")
    fields = {
        "parallel.schedule": name,
        "parallel.virtual_stages": int(virtual or 1),
        "parallel.num_microbatches": microbatches,
        "train.global_batch_size": microbatches,
    }
    return resolve(replace(base, **fields), 2)


def measure(base: Config, cases: Sequence[tuple[str, int]], rounds: int, steps: int):
    """Time the train step of each (schedule, microbatches). Yield the case and its figures."""
    configs = [config_of(base, *case) for case in cases]
    mesh = make_mesh(configs[0].parallel)
    began = time.perf_counter()
    batches = [traces.shard_batch(traces.random_batch(cfg), cfg, mesh) for cfg in configs]
    state = init_state(configs[0], mesh)  # of the same shapes for all
    traced = [
        make_train_step(cfg, mesh, 1).lower(state, batch)
        for cfg, batch in zip(configs, batches, strict=True)
    ]
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda step: step.compile(), traced))
    print(f"{len(programs)} programs compiled in {time.perf_counter() - began:.0f} s", flush=True)
    runs, first = [], []
    for cfg, program, batch in zip(configs, programs, batches, strict=True):
        del state
        state, run = init_state(cfg, mesh), FirstRunAlone(program)
        state, metrics = run(state, batch)
        first.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        runs.append((run, batch))
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for took, (run, batch) in zip(seconds, runs, strict=True):
            state, metrics = run(state, batch)
            jax.block_until_ready(metrics)
            began = time.perf_counter()
            for _ in range(steps):
                state, metrics = run(state, batch)
            jax.block_until_ready((state, metrics))
            took.append((time.perf_counter() - began) / steps)
    for case, program, (loss, norm), took in zip(cases, programs, first, seconds, strict=True):
        memory = program.memory_analysis()
        yield {
            "schedule": case[0],
            "microbatches": case[1],
            "ms": 1e3 * statistics.median(took),
            "fastest_ms": 1e3 * min(took),
            "slowest_ms": 1e3 * max(took),
            "temporary_gib": memory.temp_size_in_bytes / 2**30 if memory else None,
            "loss": loss,
            "grad_norm": norm,
        }


def fits(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return (a, b) of `ms = a + b * microbatches` of each schedule with two numbers or more."""
    found = {}
    for name in dict.fromkeys(row["schedule"] for row in rows):
        own = [row for row in rows if row["schedule"] == name]
        if len(own) > 1:
            b, a = np.polyfit([r["microbatches"] for r in own], [r["ms"] for r in own], 1)
            found[name] = float(a), float(b)
    return found


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--schedules", default="1f1b,gpipe", help="schedules, separated by commas (%(default)s)")
    add("--microbatches", default="4,8", help="numbers of microbatches (%(default)s)")
    add("--layers", type=int, default=4, help="layers of the model (%(default)s)")
    add("--seq-len", type=int, default=8192, help="tokens of a microbatch (%(default)s)")
    add("--rounds", type=int, default=3, help="rounds over all programs (%(default)s)")
    add("--steps", type=int, default=2, help="timed steps of a program in a round (%(default)s)")
    add("--small", action="store_true", help="a tiny model on simulated devices")
    add("--card", help="JSON file to which to write the figures")
    add("--commit", help="commit to record on the card, if there is no checkout")
    options = parser.parse_args(argv)
    try:
        check_file("--card", options.card)
    except ConfigError as error:
        parser.error(str(error))
    fields = SMALL if options.small else {"data.seq_len": options.seq_len}
    base = replace(BASE, **{"model.num_layers": options.layers} | fields)
    environment = runtime.start(base)
    counts = [int(word) for word in options.microbatches.split(",")]
    cases = [(name, count) for name in options.schedules.split(",") for count in counts]
    commit = options.commit or provenance.checked_out_commit()
    card: dict[str, Any] = conditions.of_this_process(environment, commit)
    print(f"{card['device']}; {options.layers} layers, T {base.data.seq_len:,}", flush=True)
    rows = []
    print(f"{'':14}{'M':>4}{'ms':>10}{'fastest':>10}{'slowest':>10}{'GiB':>8}  loss, norm")
    for row in measure(base, cases, options.rounds, options.steps):
        times = f"{row['ms']:10.2f}{row['fastest_ms']:10.2f}{row['slowest_ms']:10.2f}"
        known = f"  {row['loss']:.5f} {row['grad_norm']:.5f}"
        memory = row["temporary_gib"] or 0
        print(f"{row['schedule']:14}{row['microbatches']:4}{times}{memory:8.2f}{known}", flush=True)
        rows.append(row)
    for name, (a, b) in fits(rows).items():
        told = f"{a:.1f} + {b:.2f} M ms; a is {a / b:.2f} microbatches"
        print(f"{name}: {told}", flush=True)
    if options.card:
        outputs.write_json("--card", options.card, card | {"rows": rows, "fits": fits(rows)})


if __name__ == "__main__":
    run_program(main)
