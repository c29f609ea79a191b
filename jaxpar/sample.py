"""Text from a run or a published folder: python -m jaxpar.sample RUN --prompt "def " """

from collections.abc import Sequence

import tyro

from jaxpar.inference.sample import SampleOptions, sample
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> None:
    """The command line."""
    sample(
        tyro.cli(
            SampleOptions, args=list(argv), prog="python -m jaxpar.sample", description=__doc__
        )
    )


if __name__ == "__main__":
    run_program(main)
