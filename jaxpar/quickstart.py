"""The first run: python -m jaxpar.quickstart (or: make quickstart)

Prepares the Python standard library's source as text, trains a small Llama on it, and lets the
model write. Run again, it goes on from where it stopped.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from jaxpar.config import validate
from jaxpar.config.command_line import load_config, parse_overrides
from jaxpar.data.formats.meta import read_meta
from jaxpar.data.prepare.progress import console_progress
from jaxpar.data.prepare.text import PrepareOptions, prepare
from jaxpar.inference.sample import SampleOptions, sample
from jaxpar.runtime import start as runtime
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.program import run_program
from jaxpar.training.first_run import headline, report
from jaxpar.training.start import run_to_end


def main(argv: Sequence[str]) -> int:
    """The command line."""
    began = time.perf_counter()
    cfg = parse_overrides(load_config("quickstart"), argv, "jaxpar.quickstart", __doc__)
    validate.check(cfg)
    rendezvous.require_single_process("jaxpar.quickstart")
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
    sample(SampleOptions(run=str(run_dir), prompt=("import ",), max_tokens=300, save=True))
    report(run_dir, data, meta.unigram_entropy, time.perf_counter() - began)
    return 0


if __name__ == "__main__":
    run_program(main)
