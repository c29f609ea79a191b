"""What the command lines of the benchmarks share."""

import argparse
from typing import NoReturn

from jaxpar.config import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are config errors, in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises:   ConfigError, always."""
        raise ConfigError("command line", self.prog, message, "see --help")


def parser(prog: str, doc: str | None, repeats: int) -> Parser:
    """A parser with the options that every timed benchmark has.

    Args:     prog: as in `python -m jaxpar.bench loss`. doc: for --help. repeats: the default.
    """
    made = Parser(prog=prog, description=doc, allow_abbrev=False)
    add = made.add_argument
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--repeats", type=int, default=repeats, help="batches timed of each program (%(default)s)")
    add("--card", help="file to write the figures to, as JSON")
    add("--commit", help="commit to put on the card, where there is no checkout")
    return made


def check_repeats(options: argparse.Namespace) -> None:
    """Raises:   ConfigError unless --repeats is a number of times."""
    if options.repeats < 1:
        raise ConfigError("--repeats", options.repeats, "must be at least 1", "use --repeats 15")
