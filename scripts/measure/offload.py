"""Compare where and how the optimizer's state is stored: python scripts/measure/offload.py [CONFIG]

Takes the train step of CONFIG (llama_1b) on random tokens, on all GPUs of this host, once for each
of KINDS. Each runs in a process of its own, since memory peaks are those of a process. Prints a
table, and writes a card with --card FILE: seconds per step, the peak of the device's memory, the
state on the device and in host memory, and the losses of the first steps, which show what the
storage changes. Words that begin with -- set fields of the config:

    python scripts/measure/offload.py --card offload.json
    python scripts/measure/offload.py llama_1b --train.global-batch-size 4 --kinds adamw,8bit
    python scripts/measure/offload.py --small        # a tiny model on a CPU
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpar.certification import traces
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from jaxpar.monitoring.metrics import peak_memory_gib
from jaxpar.runtime import provenance
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import outputs
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.program import run_program
from jaxpar.sharding.mesh import make_mesh
from jaxpar.step.compiled import FirstRunAlone
from jaxpar.step.state import bytes_per_device, init_state
from jaxpar.step.train_step import make_train_step
from jaxpar.tools.bench import conditions

_BOTH = ("optimizer.first_moment_dtype", "optimizer.second_moment_dtype")

#: What is compared: names, and fields of the config.
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "bfloat16": dict.fromkeys(_BOTH, "bfloat16"),
    "8bit": dict.fromkeys(_BOTH, "8bit"),
    "host": {"optimizer.offload": True},
    "masters-host": {"optimizer.offload": True, "optimizer.offload_masters": True},
    "8bit-host": dict.fromkeys(_BOTH, "8bit") | {"optimizer.offload": True},
}

#: A step must fit on the GPU with everything in float32, and few sequences show the update's time.
FIELDS = {"train.global_batch_size": 2, "optimizer.warmup_steps": 0, "data.document_mask": False}

#: To try the script on a CPU.
SMALL = {
    "model.num_layers": 2,
    "model.d_model": 128,
    "model.*.mixer.num_heads": 2,
    "model.*.mixer.num_kv_heads": 2,
    "model.*.feed_forward.d_ff": 256,
    "model.vocab_size": 512,
    "data.seq_len": 64,
}

#: The line of a child that has its figures.
MARK = "figures: "


def measure(cfg: Config, steps: int) -> dict[str, Any]:
    """Time a config's train step on random tokens, in this process."""
    cfg = resolve(cfg, len(jax.devices()))
    mesh = make_mesh(cfg.parallel)
    batches = [traces.shard_batch(traces.random_batch(cfg, i), cfg, mesh) for i in range(2)]
    began = time.perf_counter()
    state = init_state(cfg, mesh)
    on_host = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind == "pinned_host"]
    whole, in_host = bytes_per_device(state), sum(map(_bytes, on_host))
    program = make_train_step(cfg, mesh, 1).lower(state, batches[0]).compile()
    compiled, memory = time.perf_counter() - began, program.memory_analysis()
    run, losses, seconds = FirstRunAlone(program), [], []
    for i in range(steps + 2):
        began = time.perf_counter()
        state, metrics = run(state, batches[i % 2])
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - began)
    return {
        "ms": 1e3 * statistics.median(seconds[2:]),
        "fastest_ms": 1e3 * min(seconds[2:]),
        "slowest_ms": 1e3 * max(seconds[2:]),
        "first_step_seconds": seconds[0],
        "compile_seconds": compiled,
        "peak_memory_gib": peak_memory_gib(),
        "state_on_device_gib": (whole - in_host) / 2**30,
        "state_in_host_gib": in_host / 2**30,
        "temporary_gib": memory.temp_size_in_bytes / 2**30 if memory else None,
        "losses": losses,
    }


def _bytes(x: jax.Array) -> int:
    return x.addressable_shards[0].data.nbytes


def in_child(kind: str, argv: Sequence[str]) -> dict[str, Any]:
    """Measure a kind in a process of its own, and return its figures, or the error."""
    command = [sys.executable, str(Path(__file__)), *argv, "--only", kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not found:
        print(done.stdout, file=sys.stderr)
        return {"error": done.stdout.strip().splitlines()[-1][:300] if done.stdout.strip() else ""}
    return json.loads(found[-1].removeprefix(MARK))


def line_of(kind: str, row: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "error" in row:
        return f"{kind:14}failed: {row['error']}"
    names = ("ms", "peak_memory_gib", "state_on_device_gib", "state_in_host_gib")
    figures = "".join(f"{row[name]:11.2f}" for name in names)
    losses = " ".join(f"{loss:.4f}" for loss in row["losses"][:6])
    return f"{kind:14}{figures}  {losses}"


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", nargs="?", default="llama_1b", metavar="CONFIG")
    add("--kinds", default=",".join(KINDS), help="separated by commas (%(default)s)")
    add("--steps", type=int, default=8, help="timed steps of each (%(default)s)")
    add("--small", action="store_true", help="a tiny model, to try the script on a CPU")
    add("--card", help="JSON file to which to write the figures")
    add("--commit", help="commit to record on the card, if there is no checkout")
    add("--only", choices=list(KINDS), help=argparse.SUPPRESS)
    options, others = parser.parse_known_args(argv)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"--kinds knows {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    base = replace(load_config(options.config), **(FIELDS | (SMALL if options.small else {})))
    base = parse_overrides(base, others)
    if options.only:
        cfg = replace(base, **KINDS[options.only])
        environment = runtime.start(cfg)
        commit = options.commit or provenance.checked_out_commit()
        row = measure(cfg, options.steps)
        row["conditions"] = conditions.of_this_process(environment, commit)
        print(MARK + json.dumps(row), flush=True)
        return
    try:
        check_file("--card", options.card)
    except ConfigError as error:
        parser.error(str(error))
    print(f"{'':14}{'ms':>11}{'peak GiB':>11}{'device GiB':>11}{'host GiB':>11}  losses")
    rows, card = {}, {}
    for kind in kinds:
        row = in_child(kind, argv)
        card = row.pop("conditions", card)
        rows[kind] = row
        print(line_of(kind, row), flush=True)
        if options.card:
            what = {"what": "optimizer_state"}
            outputs.write_json("--card", options.card, what | card | {"rows": rows})


if __name__ == "__main__":
    run_program(main)
