"""A run's folder as a run writes it, without training: files, lines, finished checkpoints."""

import hashlib
import json
import random
from pathlib import Path

MARK = "jaxpar_files.json"


def write_step(folder: Path, step: int, seed: int = 0, size: int = 20_000) -> dict[str, bytes]:
    """Write a finished checkpoint, and return its files."""
    place, made = folder / "checkpoints" / str(step), random.Random(f"{step} {seed}")
    files = {
        "_CHECKPOINT_METADATA": made.randbytes(100),
        "state/manifest.ocdbt": made.randbytes(200),
        "state/d/0123": made.randbytes(size),
        "state/empty": b"",
    }
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    files[MARK] = json.dumps(sums).encode()
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return files


def read_step(folder: Path, step: int) -> dict[str, bytes]:
    place = folder / "checkpoints" / str(step)
    files = sorted(p for p in place.rglob("*") if p.is_file())
    return {str(p.relative_to(place)): p.read_bytes() for p in files}


def write_run(folder: Path, steps: list[int]) -> None:
    """Write a run with checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"run": {}}')
    append(folder, *range(1, max(steps, default=0) + 1))
    for step in steps:
        write_step(folder, step)


def append(folder: Path, *steps: int) -> None:
    """Append lines to the metrics of a run."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(f'{{"step": {step}}}\n' for step in steps)
