"""The first run: python -m jaxpar.quickstart (or: make quickstart)

Prepares the Python standard library's source as text, trains a small Llama on it, and lets the
model write. Run again, it goes on from where it stopped.
"""

import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxpar import cli, json_lines, processes, runtime, validation
from jaxpar.data.meta import read_meta
from jaxpar.data.prepare import PrepareOptions, prepare
from jaxpar.data.progress import console_progress
from jaxpar.sample import Options, sample
from jaxpar.train import run_to_end


def main(argv: Sequence[str]) -> int:
    """The command line."""
    began = time.perf_counter()
    cfg = cli.parse_overrides(cli.load_config("quickstart"), argv, "jaxpar.quickstart", __doc__)
    validation.check(cfg)
    processes.alone("jaxpar.quickstart")
    environment = runtime.start(cfg)  # refuses before the text is written
    data, run_dir = Path(cfg.data.path), Path(cfg.run.dir)
    headline("1. The text: the Python standard library's source")
    if not (data / "meta.json").exists():
        options = PrepareOptions(input=("stdlib",), output=str(data), tokenizer="bytes")
        with console_progress() as progress:
            prepare(options, progress)
    meta = read_meta(data)
    print(f"{meta.splits['train'].num_tokens:,} tokens in {data}")
    headline(f"2. Training for {cfg.train.num_steps} steps")
    code = run_to_end(cfg, environment)
    if code:
        return code
    headline("3. What it writes")
    sample(Options(run=str(run_dir), prompt=("import ",), max_tokens=300, save=True))
    report(run_dir, data, meta.unigram_entropy, time.perf_counter() - began)
    return 0


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
        f"{run_dir}/checkpoints/": "weights and optimiser state",
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


if __name__ == "__main__":
    cli.run_program(main)
