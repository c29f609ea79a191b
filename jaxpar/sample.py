"""Generate text with a run or a published model: python -m jaxpar.sample RUN --prompt "def " """

from collections.abc import Sequence

from jaxpar.inference.sample import SampleOptions, sample
from jaxpar.runtime.option_classes import read_options
from jaxpar.runtime.program import run_program
from jaxpar.stores.reading import with_local_runs


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    options = read_options(SampleOptions, argv, "jaxpar.sample", __doc__)
    sample(with_local_runs(options, print))


if __name__ == "__main__":
    run_program(main)
