"""The first run: its training text, and the output of `python -m jaxpar.train quickstart`."""

import math
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpar.config import Config
from jaxpar.config.config_file import load_config
from jaxpar.config.validate import resolve
from jaxpar.data.formats.meta import META_FILE, Meta, read_meta
from jaxpar.monitoring.goodput import process_age
from jaxpar.prediction.startup import check_fits
from jaxpar.runtime.files import json_lines
from jaxpar.runtime.processes import peers
from jaxpar.runtime.units import duration


def prepare_text(folder: str) -> None:
    """Prepare the text of the first run, the Python standard library's source, unless it exists."""
    if (Path(folder) / META_FILE).exists():
        return
    from jaxpar.data.options import PrepareOptions
    from jaxpar.data.prepare.progress import console_progress
    from jaxpar.data.prepare.text import prepare

    options = PrepareOptions(input=("stdlib",), output=folder, tokenizer="bytes")
    with console_progress() as progress:
        prepare(options, progress)


def prepare_quickstart(cfg: Config) -> bool:
    """Prepare the text of the config `quickstart`, in process 0. Does nothing for other data.

    `python -m jaxpar.train quickstart` therefore needs no other command first.

    Returns:  whether the run has this text.
    Raises:   ConfigError when the config cannot run on these devices; nothing is written then.
    """
    if cfg.data.mixture or cfg.data.path != load_config("quickstart").data.path:
        return False

    def work() -> None:
        devices = jax.device_count()  # in every process: JAX waits for all of them
        if peers.rank() == 0 and not (Path(cfg.data.path) / META_FILE).exists():
            if not cfg.parallel.auto:
                check_fits(resolve(cfg, devices), peers.processes_here())
            peers.log(f"text       the Python standard library's source, to {cfg.data.path}")
            prepare_text(cfg.data.path)

    peers.all_or_none("text", cfg.cluster.slow_seconds or 1e6, work)
    return True


def learned(records: Iterable[Mapping[str, Any]], meta: Meta) -> str:
    """Say what a loss means.

    Args:
        records: of metrics.jsonl.
        meta: of the text.
    """
    last = {name: value for record in records for name, value in record.items()}
    loss, text = last["loss"], "the training text"
    if "held_out_loss" in last:
        loss, text = last["held_out_loss"], "text that it has not seen"
    known = (
        "it has learned to use context" if loss < meta.unigram_entropy else "it needs more steps"
    )
    return (
        f"What it learned: its loss on {text} is {loss:.2f}. Guessing has "
        f"{math.log(meta.vocab_size):.2f},\nand knowing only how often each token occurs "
        f"{meta.unigram_entropy:.2f}: {known}."
    )


def report(run_dir: Path, data: Path) -> None:
    """Print what the model learned, where the results are, and the time since the process started:
    the clock from which goodput counts."""
    print(f"\n{learned(json_lines.read(run_dir / 'metrics.jsonl'), read_meta(data))}")
    print(f"\nDone in {duration(process_age())}\n")
    places = {
        f"{data}/": "text as tokens",
        f"{run_dir}/config.json": "every setting of the run",
        f"{run_dir}/metrics.jsonl": "loss, learning rate, speed by step",
        f"{run_dir}/checkpoints/": "weights and optimizer state",
    }
    width = max(map(len, places))
    python, run = shlex.quote(sys.executable), shlex.quote(str(run_dir))
    lines = [
        *(f"{place:<{width}}   {what}" for place, what in places.items()),
        "",
        f"Report:     {python} -m jaxpar.report {run}",
        f"More text:  {python} -m jaxpar.sample {run} --prompt 'class '",
        f"Longer:     {python} -m jaxpar.train quickstart --train.num-steps 1000 "
        "--run.dir runs/longer",
    ]
    print("\n".join(lines), flush=True)
