"""Generate text with a run or a published model: python -m jaxpar.sample RUN --prompt "def " """

from collections.abc import Sequence

from jaxpar.inference.sample import SampleOptions, sample
from jaxpar.runtime.option_classes import read_options
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    sample(read_options(SampleOptions, argv, "jaxpar.sample", __doc__))


if __name__ == "__main__":
    run_program(main)
