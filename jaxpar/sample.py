"""Generate text with a run or a published model: python -m jaxpar.sample RUN --prompt "def "

Or talk with it: python -m jaxpar.sample --chat RUN. Lines are messages; `/reset` starts over,
`/system TEXT` sets the instruction, Ctrl-C ends an answer, and Ctrl-D or `/quit` the program. From
a pipe, each line is a message.
"""

from jaxpar import commands
from jaxpar.inference.options import ChatOptions, SampleOptions

OPTIONS = {"": SampleOptions, "--chat": ChatOptions}


def main(options: SampleOptions | ChatOptions) -> None:
    """Print the texts, or start the conversation."""
    from jaxpar.inference.chat import chat
    from jaxpar.inference.sample import sample
    from jaxpar.stores.reading import with_local_runs

    match with_local_runs(options, print):
        case ChatOptions() as options:
            chat(options)
        case SampleOptions() as options:
            sample(options)


if __name__ == "__main__":
    commands.run(__name__)
