"""Messages for whoever watches a program."""

import sys


def warn(text: str) -> None:
    """Print a warning to standard error."""
    print(f"WARNING    {text}", file=sys.stderr, flush=True)
