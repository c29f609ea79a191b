"""Check that activations do not grow with the width of a model: µP's coordinate check.

    python -m jaxpar.mup CONFIG --widths 128,256,512 --steps 4

Trains the config at several widths, a few steps each, on a batch of random tokens, in float32 on
one device. Prints the mean size of the activations of each kind of layer after the last step, and
the exponents by which they, and their change since the first step, grow with the width. In µP
(`model.mup`) all exponents are near 0, except that logits may shrink. In the standard
parametrization, changes grow.

Source:   Yang et al. 2022 (2203.03466), appendix D.1.
"""

from collections.abc import Sequence

from jaxpar.runtime.program import run_program
from jaxpar.verification.coordinates.command import check_coordinates, read_command


def main(argv: Sequence[str]) -> int:
    """Run the command line."""
    return check_coordinates(*read_command(argv, __doc__))


if __name__ == "__main__":
    run_program(main)
