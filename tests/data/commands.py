"""Runs `python -m jaxpar.data` within a test."""

import sys
from collections.abc import Sequence

from jaxpar.config import ConfigError
from jaxpar.data import __main__ as data
from jaxpar.runtime.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK


def main(args: Sequence[str]) -> int:
    """Run a command line. Returns: its exit code, as `run_program` ends the process."""
    try:
        data.main(args)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK
