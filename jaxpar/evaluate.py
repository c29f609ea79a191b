"""Score a model on tasks of the Evaluation Harness: python -m jaxpar.evaluate RUN --tasks NAME

RUN is a run or a published folder. Tasks are those of EleutherAI's lm_eval, and your own in
--include-path. Needs lm_eval: pip install 'jaxpar[eval]'.
"""

from collections.abc import Sequence

import tyro

from jaxpar.inference.evaluate import EvaluateOptions, evaluate
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> None:
    """The command line."""
    prog = "python -m jaxpar.evaluate"
    evaluate(tyro.cli(EvaluateOptions, args=list(argv), prog=prog, description=__doc__))


if __name__ == "__main__":
    run_program(main)
