"""Train a first model: python -m jaxpar.quickstart (or: make quickstart)

Prepares the source code of the Python standard library as text, trains a small Llama on it, and
samples from the model. The same command resumes a run that was stopped.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxpar.config import validate
from jaxpar.config.command_line import as_called, parse_overrides
from jaxpar.config.config_file import load_config
from jaxpar.data.formats.meta import read_meta
from jaxpar.inference.sample import SampleOptions, sample
from jaxpar.runtime import start as runtime
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.program import run_program
from jaxpar.training.first_run import headline, prepare_text, report
from jaxpar.training.start import run_to_end


def main(argv: Sequence[str]) -> int:
    """Run the command line."""
    prog = as_called("python -m jaxpar.quickstart")
    cfg = parse_overrides(load_config("quickstart"), argv, prog, __doc__ or "")
    validate.check(cfg)
    rendezvous.require_single_process("jaxpar.quickstart")
    environment = runtime.start(cfg)  # fails before the text is written
    data, run_dir = Path(cfg.data.path), Path(cfg.run.dir)
    headline("1. The text: the Python standard library's source")
    prepare_text(cfg.data.path)
    meta = read_meta(data)
    print(f"{meta.splits['train'].num_tokens:,} tokens in {data}")
    headline(f"2. Training for {cfg.train.num_steps} steps")
    code = run_to_end(cfg, environment)
    if code:
        return code
    headline("3. What it writes")
    sample(SampleOptions(run=str(run_dir), prompt=("import ",), max_tokens=300, save=True))
    report(run_dir, data, meta.unigram_entropy)
    return 0


if __name__ == "__main__":
    run_program(main)
