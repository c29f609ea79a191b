"""Talk with a run or a published model in the terminal: python -m jaxpar.chat RUN

Lines are messages; `/reset` starts over, `/system TEXT` sets the instruction, Ctrl-C ends an
answer, and Ctrl-D or `/quit` the program. From a pipe, each line is a message.
"""

from collections.abc import Sequence

from jaxpar.inference.chat import DialogueOptions, chat
from jaxpar.runtime.option_classes import read_options
from jaxpar.runtime.program import run_program
from jaxpar.stores.reading import with_local_runs


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    options = read_options(DialogueOptions, argv, "jaxpar.chat", __doc__)
    chat(with_local_runs(options, print))


if __name__ == "__main__":
    run_program(main)
