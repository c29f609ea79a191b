"""Score a model on tasks of the LM Evaluation Harness: python -m jaxpar.evaluate RUN --tasks NAME

RUN is a run folder or a published model. Tasks are those of EleutherAI's lm_eval, and your own
from --include-path. Requires lm_eval: pip install lm-eval.
"""

from collections.abc import Sequence

import tyro

from jaxpar.config.command_line import as_called
from jaxpar.inference.evaluate import EvaluateOptions, evaluate
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    prog, doc = as_called("python -m jaxpar.evaluate"), as_called(__doc__ or "")
    evaluate(tyro.cli(EvaluateOptions, args=list(argv), prog=prog, description=doc))


if __name__ == "__main__":
    run_program(main)
