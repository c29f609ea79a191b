"""Generate text with a run or a published model: python -m jaxpar.sample RUN --prompt "def " """

from collections.abc import Sequence

from jaxpar.inference.sample import SampleOptions, sample
from jaxpar.runtime.program import run_program
from jaxpar.runtime.typed_options import read_options


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    sample(read_options(SampleOptions, argv, "python -m jaxpar.sample", __doc__))


if __name__ == "__main__":
    run_program(main)
