"""List runs, the best one first: python -m jaxpar.runs [FOLDER ...]

Shows the steps, loss, held-out loss, tokens, speed and time of every run in the folders, and the
fields in which their configs differ. Runs may still be in progress.
"""

import dataclasses
import json
from collections.abc import Sequence

from jaxpar.report import listing
from jaxpar.report.table_of_runs import RunsOptions, found_runs, lines
from jaxpar.runtime.option_classes import read_options
from jaxpar.runtime.program import run_program


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    options = read_options(RunsOptions, argv, "jaxpar.runs", __doc__)
    shown = listing.summaries(found_runs(options.folders))
    if options.json:
        print(json.dumps([dataclasses.asdict(summary) for summary in shown], indent=2))
    else:
        print("\n".join(lines(shown)))


if __name__ == "__main__":
    run_program(main)
