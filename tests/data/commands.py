"""Runs `python -m jaxpar.data` within a test."""

import sys
from collections.abc import Sequence

from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.runtime.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK


def main(args: Sequence[str]) -> int:
    """Run a command line. Returns: its exit code, as `run_program` ends the process."""
    try:
        call("data", args)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK
