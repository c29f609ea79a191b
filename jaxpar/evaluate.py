"""Score a model on text or on tasks: python -m jaxpar.evaluate RUN --split test, or --tasks NAME

RUN is a run folder or a published model. Tasks are those of EleutherAI's lm_eval, and your own
from --include-path; they require lm_eval: pip install lm-eval.
"""

from collections.abc import Sequence

from jaxpar.inference.evaluate import EvaluateOptions, evaluate
from jaxpar.runtime.option_classes import read_options
from jaxpar.runtime.program import run_program
from jaxpar.stores.reading import with_local_runs


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    options = read_options(EvaluateOptions, argv, "jaxpar.evaluate", __doc__)
    evaluate(with_local_runs(options, print))


if __name__ == "__main__":
    run_program(main)
