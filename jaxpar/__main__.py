"""Pre-train language models: jaxpar COMMAND, or python -m jaxpar COMMAND"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jaxpar
from jaxpar import commands
from jaxpar.config import pages
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> int | None:
    """Run the command that the command line names, or list all commands."""
    name, *rest = argv or ["--help"]
    called = "python -m jaxpar" if Path(sys.argv[0]).name == "__main__.py" else "jaxpar"
    if name == "--complete":
        print("\n".join(commands.completions(os.environ.get("COMP_LINE", ""))))
        return 0
    if name in ("--help", "-h") and rest:
        pages.show(rest[0], called)
        return 0
    if name in ("--help", "-h", "--version"):
        listed = commands.help_text(called)
        print(f"jaxpar {jaxpar.__version__}" if name == "--version" else listed)
        return 0
    if name not in commands.COMMANDS:
        raise commands.unknown_command(name, called)
    sys.argv = [f"{called} {name}", *rest]  # `command_line.as_called` reads it
    return commands.call(name, rest)


def run() -> NoReturn:
    """Entry point of the console command."""
    run_program(main)


if __name__ == "__main__":
    run()
