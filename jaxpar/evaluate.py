"""Score a model on text or on tasks: python -m jaxpar.evaluate RUN --split test, or --tasks NAME

RUN is a run folder or a published model. Tasks are those of EleutherAI's lm_eval, and your own
from --include-path; they require lm_eval: pip install lm-eval.
"""

from jaxpar import commands
from jaxpar.inference.options import EvaluateOptions

OPTIONS = EvaluateOptions


def main(options: EvaluateOptions) -> None:
    """Score the model, and print the results."""
    from jaxpar.inference.evaluate import evaluate
    from jaxpar.stores.reading import with_local_runs

    evaluate(with_local_runs(options, print))


if __name__ == "__main__":
    commands.run(__name__)
