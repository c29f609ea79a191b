"""Take a step of a run again: python -m jaxpar.replay RUN --step N

From the checkpoint before it, with the batches that RUN/recent.jsonl names, as often as asked, and
on other devices where there are some. What comes out is compared bit by bit, with the record and
with itself: was it the data, the hardware or the numerics? Nothing is written.
"""

from collections.abc import Sequence

import tyro

from jaxpar.config.command_line import as_called
from jaxpar.runtime.program import run_program
from jaxpar.verification.replay import ReplayOptions, replay


def main(argv: Sequence[str]) -> None:
    """The command line."""
    prog, doc = as_called("python -m jaxpar.replay"), as_called(__doc__ or "")
    replay(tyro.cli(ReplayOptions, args=list(argv), prog=prog, description=doc))


if __name__ == "__main__":
    run_program(main)
