"""What `python -m jaxpar.quickstart` says between its parts, and at its end."""

import math
import shlex
import sys
from pathlib import Path

from jaxpar.runtime.files import json_lines


def headline(text: str) -> None:
    """A title between the parts."""
    print(f"\n== {text}", flush=True)


def report(run_dir: Path, data: Path, unigram_entropy: float, seconds: float) -> None:
    """What came out, and where it lies."""
    loss = [r["loss"] for r in json_lines.read(run_dir / "metrics.jsonl") if "loss" in r][-1]
    headline(f"Done in {seconds:.0f} s")
    places = {
        f"{data}/": "text as tokens",
        f"{run_dir}/config.json": "every setting of the run",
        f"{run_dir}/metrics.jsonl": "loss, learning rate, speed by step",
        f"{run_dir}/checkpoints/": "weights and optimizer state",
    }
    width = max(map(len, places))
    python, run = shlex.quote(sys.executable), shlex.quote(str(run_dir))
    lines = [
        f"training loss at the end    {loss:.3f} nats per token ({loss / math.log(2):.2f} bits)",
        f"unigram entropy of the text {unigram_entropy:.3f}: the loss of knowing only how often "
        "each token occurs",
        "",
        *(f"{place:<{width}}   {what}" for place, what in places.items()),
        "",
        f"Report:     {python} -m jaxpar.report {run}",
        f"More text:  {python} -m jaxpar.sample {run} --prompt 'class '",
        f"Longer:     {python} -m jaxpar.train quickstart --train.num-steps 1000 "
        "--run.dir runs/longer",
    ]
    print("\n".join(lines), flush=True)
