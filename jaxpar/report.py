"""Write a report of one or more runs: python -m jaxpar.report RUN [RUN ...] [--output FILE.html]

The report is a single HTML file that loads nothing else. It shows loss, speed and memory over steps
and tokens, restarts, checkpoints and lost time, config, environment and samples. Several runs share
the charts. The runs may still be in progress: --watch 30 keeps the page up to date.

Or list runs, the best one first: python -m jaxpar.report --list [FOLDER ...]
"""

from jaxpar import commands
from jaxpar.tools.report.options import ListOptions, ReportOptions

OPTIONS = {"": ReportOptions, "--list": ListOptions}


def main(options: ReportOptions | ListOptions) -> None:
    """Write the report, or print the list."""
    from jaxpar.tools.report.command import list_runs, write_report

    match options:
        case ListOptions():
            list_runs(options)
        case ReportOptions():
            write_report(options)


if __name__ == "__main__":
    commands.run(__name__)
