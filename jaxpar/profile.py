"""Show where a step's time and memory go: python -m jaxpar.profile RUN_OR_TRACE [--step N]

Reads the traces of a run (taken with `--profile.start N`, or by creating RUN/profile.request during
the run), or any JAX trace. With a second profile, compares the two. docs/profiling.md explains how
to take a trace, and each figure.

Or measure a config, and compare the cards of measurements, with the conditions that differ:

    python -m jaxpar.profile --bench CONFIG --card A.json
    python -m jaxpar.profile A.json B.json
"""

from jaxpar import commands
from jaxpar.tools.profiling.options import BenchOptions, ProfileOptions

OPTIONS = {"": ProfileOptions, "--bench": BenchOptions}


def main(options: ProfileOptions | BenchOptions) -> int | None:
    """Show a profile, compare two or cards, or measure a config."""
    if isinstance(options, BenchOptions):
        from jaxpar.tools.bench.command import bench

        return bench(options)
    if options.paths[0].endswith(".json"):
        from jaxpar.tools.bench.cards import compare

        compare(options.paths)
    else:
        from jaxpar.tools.profiling.command import show

        show(options)
    return None


if __name__ == "__main__":
    commands.run(__name__)
