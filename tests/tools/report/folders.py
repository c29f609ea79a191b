"""Run folders as training writes them, without training."""

import json
import math
import random
from pathlib import Path

from jaxpar.config import Config, replace
from jaxpar.config.serialize import to_json
from jaxpar.monitoring.routing import LOADS_FILE
from jaxpar.monitoring.samples import write_sample

TOKENS = 8192


def record(step: int, noise: random.Random, *, loss: float | None = None) -> dict:
    """A line of metrics.jsonl."""
    loss = 2 + 8 / math.sqrt(step) + 0.1 * noise.random() if loss is None else loss
    seconds = 0.5 + 0.02 * noise.random()
    return {
        "step": step,
        "learning_rate": 3e-4 * min(step / 50, 1),
        "loss": None if math.isnan(loss) else loss,
        "grad_norm": 20 / step + 0.2 * noise.random(),
        "skipped": 0,
        "tokens_seen": step * TOKENS,
        "step_seconds": seconds,
        "tokens_per_second": TOKENS / seconds,
        "tokens_per_second_per_device": TOKENS / seconds / 4,
        "mfu": 0.55 * 0.5 / seconds,
        "data_wait_seconds": 0.001,
        "memory_gib": 41.5,
    }


def write_lines(path: Path, records) -> None:
    """Append records."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_loads(folder: Path, steps, loads=lambda step: [[step, 3 * step], [step, step]]) -> None:
    """Append records of the loads of experts: of two layers of two experts each."""
    write_lines(folder / LOADS_FILE, ({"step": step, "loads": loads(step)} for step in steps))


def write_layers(folder: Path, steps, value, *, name="layer_grad_norm", layers=4) -> None:
    """Add a metric of layers to the records of some steps: value(step, layer)."""
    add_values(folder, {s: {name: [value(s, layer) for layer in range(layers)]} for s in steps})


def add_values(folder: Path, values: dict[int, dict]) -> None:
    """Add values to the records of some steps."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    of = lambda line: values.get(line.get("step"), {}) if "loss" in line else {}  # noqa: E731
    write_lines(file, (line | of(line) for line in lines))


def event(name: str, attempt: int, age: float, **more) -> dict:
    """A line of events.jsonl; attempts begin an hour after one another."""
    return {"event": name, "attempt": attempt, "age": age, "time": 3600 * attempt + age, **more}


def write_run(folder: Path, *, steps: int = 200, seed: int = 0, **config) -> Path:
    """A run of two attempts, the second from 3/4 of its steps, with a spike of skipped updates."""
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    cfg = replace(Config(), **{"run.dir": folder.name, "train.num_steps": steps, **config})
    (folder / "config.json").write_text(to_json(cfg))
    manifest = {"jaxpar": "0.1", "jax": "0.11.2", "commit": "abc123", "device": "4 x H200"}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"mesh": "data=4"}))
    metrics, died, back = folder / "metrics.jsonl", steps * 4 // 5, steps * 3 // 4
    write_lines(metrics, [{"predicted_step_seconds": 0.5, "predicted_memory_gib": 42.0}])
    write_lines(
        metrics, (record(s, noise, loss=50.0 if s > back else None) for s in range(1, died))
    )
    write_lines(metrics, [{"resumed_after_step": back}])
    for step in range(back + 1, steps + 1):
        write_lines(metrics, [record(step, noise) | {"skipped": 2 * (step > back + 5)}])
        if step % 20 == 0:
            write_lines(metrics, [{"step": step, "held_out_loss": 2.1 + 8 / math.sqrt(step)}])
    save = {"bytes": 10**9, "seconds": 3.0, "loop_waited": 0.1}
    spent = lambda a, b: {"steps": [a, b], "seconds": {"step": (b - a) * 0.5, "compile": 9.0}}  # noqa: E731
    write_lines(
        folder / "events.jsonl",
        [
            event("start", 1, 5.0, devices=4, processes=1),
            event("from", 1, 20.0, step=0),
            event("time", 1, 20.0 + back / 2, **spent(0, back)),
            event("saved", 1, 21.0 + back / 2, step=back, **save),
            event("time", 1, 22.0 + died / 2, **spent(back, died)),
            event("start", 2, 5.0, devices=4, processes=1),
            event("from", 2, 20.0, step=back),
            event("time", 2, 25.0 + (steps - back) / 2, **spent(back, steps)),
            event("end", 2, 26.0 + (steps - back) / 2, reason="ended"),
        ],
    )
    write_sample(folder, steps, "def ", "f(x):\n    return x", temperature=0.8)
    return folder
