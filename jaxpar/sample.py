"""Generate text with a run or a published model: python -m jaxpar.sample RUN --prompt "def " """

from collections.abc import Sequence

import tyro

from jaxpar.config.command_line import as_called
from jaxpar.inference.sample import SampleOptions, sample
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    prog, doc = as_called("python -m jaxpar.sample"), as_called(__doc__ or "")
    sample(tyro.cli(SampleOptions, args=list(argv), prog=prog, description=doc))


if __name__ == "__main__":
    run_program(main)
