"""Kill a run whose sizes and mixture change by schedule, and move it: are the losses the same?

    python scripts/measure/schedules.py [--kills 10] [--steps 60] [--seed 0] [--folder DIR]

Trains a tiny model on two sources, in float32 on simulated CPU devices. Its batch, the length of
its sequences and the weights of its mixture change by schedule, several times. One run is left
alone. Another one is killed with SIGKILL at random steps, and each time continues on the next of
MESHES, some of them in two processes. Both must have taken the same batches, counted the same
tokens, and have the same losses and gradient norms, to rounding: the meshes add in other orders.
A third run is killed at every third of these steps, on the mesh of the first: its losses must have
the same bits.

Prints a table of the attempts and one of the comparisons, and ends with 1 if anything differs.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpar.config import BatchSize, MixtureWeights, SequenceLength, Source
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.monitoring.recent_steps import read_recent

ROOT = Path(__file__).resolve().parents[2]

#: Fields of a mesh, and the number of its processes; four devices in all.
MESHES = {
    "data 4": ("--parallel.data 4", 1),
    "data 2, sequence 2, in 2 processes": ("--parallel.data 2 --parallel.sequence 2", 2),
    "pipeline 2, tensor 2": ("--parallel.pipeline 2 --parallel.tensor 2 --parallel.zero 1", 1),
}
DEVICES = 4

#: The most by which losses and gradient norms of two meshes differ, relative to themselves.
ROUNDING = 1e-4

#: A start or a step that takes longer hangs.
MAX_SECONDS = 300.0

CONFIG = """
from jaxpar.config import *

def get_config():
    layer = Layer("layers", Attention(num_heads=4, num_kv_heads=2, head_dim=8), Glu(64))
    return Config(
        data=DataConfig(
            mixture={mixture!r}, mixture_schedule={weights!r}, seq_len=64,
            length_schedule={lengths!r},
        ),
        model=Model(d_model=32, vocab_size=272, layers=[layer] * 2),
        compute=ComputeConfig(dtype="float32"),
        train=TrainConfig(
            num_steps={steps}, global_batch_size=16, batch_schedule={batches!r}, log_every=1
        ),
        parallel=ParallelConfig(num_microbatches=4),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_fraction=0.1),
        checkpoint=CheckpointConfig(every=3),
        evaluation=EvaluationConfig(every=0),
    )
"""


@dataclass(frozen=True)
class Attempt:
    """A start of a run: its mesh, the first and the last recorded step, and how it ended."""

    mesh: str
    first: int
    last: int
    end: str


def write_config(folder: Path, steps: int) -> str:
    """Prepare two sources and write the config; returns its path."""
    draw = random.Random(0)
    paths = []
    for name, words in (("prose", "the cat sat on a mat and ran"), ("code", "if x: y = f(z) else")):
        text = folder / f"{name}.jsonl"
        lines = (" ".join(draw.choices(words.split(), k=draw.randint(20, 200))) for _ in range(300))
        text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        prepare(PrepareOptions(input=(str(text),), output=str(folder / name)))
        paths.append(str(folder / name))
    at = [round(steps * share) for share in (0.2, 0.35, 0.5, 0.7, 0.85)]
    file = folder / "scheduled.py"
    fields = {
        "mixture": (Source(paths[0], 0.8), Source(paths[1], 0.2)),
        "weights": (MixtureWeights(at[1], (0.5, 0.5)), MixtureWeights(at[4], (0, 1))),
        "lengths": tuple(map(SequenceLength, (0, at[0], at[3]), (16, 32, 64))),
        "batches": tuple(map(BatchSize, (0, at[1], at[2]), (4, 8, 16))),
    }
    file.write_text(CONFIG.format(steps=steps, **fields))
    return str(file)


def start(config: str, run: Path, mesh: str, log: Path) -> subprocess.Popen:
    """Start the training program on a mesh, in a session of its own."""
    fields, processes = MESHES[mesh]
    words = [config, *fields.split(), "--run.dir", str(run)]
    command = [sys.executable, "-m", "jaxpar.train", *words, "--run.cpu-devices", str(DEVICES)]
    if processes > 1:
        each = str(DEVICES // processes)
        command = [sys.executable, "-m", "jaxpar.launch", "-n", str(processes)]
        command += ["--run.cpu-devices", each, "--restarts", "0", "--", *words]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    with open(log, "a") as out:
        kept = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(command, env=env, cwd=ROOT, **kept)  # type: ignore[call-overload]


def records(run: Path) -> Iterator[dict]:
    """Yield the complete records of a run's metrics."""
    file = run / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.endswith("}"):
            yield json.loads(line)


def steps_of(run: Path) -> dict[int, dict]:
    """Return the last record of each step."""
    return {record["step"]: record for record in records(run) if "loss" in record}


def attempt(config: str, run: Path, mesh: str, until: int | None, log: Path) -> Attempt:
    """Run until a step or a later one is recorded, and kill all processes; None: to the end."""
    before = sum("loss" in record for record in records(run))
    own = lambda: [r["step"] for r in records(run) if "loss" in r][before:]  # noqa: E731
    process = start(config, run, mesh, log)
    over, end = time.monotonic() + MAX_SECONDS, "done"
    while process.poll() is None:
        if time.monotonic() > over:
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"{run}: no end after {MAX_SECONDS:.0f} s; see {log}")
        if until is not None and max(own(), default=0) >= until:
            os.killpg(process.pid, signal.SIGKILL)
            end = "killed"
            break
        time.sleep(0.01)
    code = process.wait()
    if end == "done" and code != 0:
        raise SystemExit(f"{run} ended with code {code} on {mesh}; see {log}")
    return Attempt(mesh, min(own(), default=0), max(own(), default=0), end)


def killed_run(
    config: str, run: Path, kills: Sequence[int], meshes: Sequence[str], log: Path
) -> list[Attempt]:
    """Run to the end, killed at these steps, on one mesh after another."""
    found = []
    for number, until in enumerate([*kills, None]):
        found.append(attempt(config, run, meshes[number % len(meshes)], until, log))
        show(found[-1])
    return found


def show(one: Attempt) -> None:
    """Print a line of the table of attempts."""
    print(f"{one.mesh:<36} {one.first:>5} to {one.last:>4}   {one.end}", flush=True)


def compare(name: str, run: Path, whole: Path, steps: int, tolerance: float) -> bool:
    """Print how far a run is from another, and return whether it is the same."""
    found, wanted = steps_of(run), steps_of(whole)
    exact = ("tokens_seen", "global_batch_size", "seq_len", "learning_rate", "epochs", "num_tokens")
    same = sorted(found) == sorted(wanted) == list(range(1, steps + 1))
    same = same and all(found[n][key] == wanted[n][key] for n in wanted for key in exact)
    batches = [
        {step: (r["batch"], r["windows"]) for step, r in read_recent(folder).items()}
        for folder in (run, whole)
    ]
    same = same and batches[0] == batches[1]
    apart = {key: _furthest(found, wanted, key) for key in ("loss", "grad_norm")}
    near = max(apart.values()) <= tolerance
    what = "the same" if same else "DIFFERENT"
    told = ", ".join(f"{key} within {value:.1e}" for key, value in apart.items())
    print(f"{name:<36} batches, tokens, sizes {what}; {told}{'' if near else ': DIFFERENT'}")
    return same and near


def _furthest(found: dict[int, dict], wanted: dict[int, dict], key: str) -> float:
    both = [(found[n][key], wanted[n][key]) for n in found.keys() & wanted.keys()]
    return max((abs(a - b) / abs(b) for a, b in both), default=math.inf)


def main() -> int:
    """Do the trials and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where runs lie; by default a temporary folder")
    options = parser.parse_args()
    if options.kills < 0 or options.steps < 20:
        parser.error("--kills must be at least 0, and --steps at least 20")
    folder = Path(options.folder or tempfile.mkdtemp(prefix="schedules."))
    folder.mkdir(parents=True, exist_ok=True)
    config, log = write_config(folder, options.steps), folder / "log.txt"
    draw = random.Random(options.seed)
    kills = sorted(draw.randrange(1, options.steps) for _ in range(options.kills))
    first = next(iter(MESHES))
    print(f"{'mesh':<36} {'steps':>13}   end")
    whole, moved, stayed = (folder / name for name in ("whole", "moved", "stayed"))
    show(attempt(config, whole, first, None, log))
    print(f"killed, and moved over {len(MESHES)} meshes:")
    killed_run(config, moved, kills, [*list(MESHES)[1:], first], log)
    print("killed, on the mesh of the first run:")
    killed_run(config, stayed, kills[::3], [first], log)
    sizes = [(r["global_batch_size"], r["seq_len"]) for r in steps_of(whole).values()]
    print(f"\nsizes of steps: {', '.join(f'{a} x {b}' for a, b in dict.fromkeys(sizes))}")
    same = compare("moved, and the run left alone", moved, whole, options.steps, ROUNDING)
    same &= compare("killed on one mesh, and left alone", stayed, whole, options.steps, 0.0)
    if same and not options.folder:
        shutil.rmtree(folder)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
