"""Plan a run before it starts: python -m jaxpar.plan CONFIG --gpus N --gpu NAME [options]

Lists every layout that the config allows on the GPUs (mesh, ZeRO stage, microbatches, remat
policy), predicts the memory and step time of each, and ranks them. It uses no GPU. docs/planning.md
explains the predictions and compares them with measurements.
"""

import json
from collections.abc import Sequence

import jax

from jaxpar.config.command_line import asks_help
from jaxpar.convert.shape import model_from
from jaxpar.planning.command import MIN_WIDTH, answer, parser, read_command
from jaxpar.runtime import terminal
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    if asks_help(argv):
        parser(__doc__).parse_args(["--help"])
    asked = read_command(argv, model_from)
    # Planning computes only shapes, so it does not need a GPU.
    jax.config.update("jax_platforms", "cpu")
    width = max(terminal.console().width, MIN_WIDTH)
    console = terminal.console(highlight=False, width=width, quiet=asked.options.json)
    record = answer(asked, console)
    if asked.options.json:
        print(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    run_program(main)
