"""`jaxpar.certify` as far as the first comparison that fails.

    python -m tests.mutants.first_failure CHECK,... CONFIG [OPTION ...]

The checks named come first, in that order. Nothing looks for the smallest mesh that fails. Programs
of one device, such as those of the plain model, are kept on disk: a fault leaves most as they were.
"""

import sys
from collections.abc import Iterable, Iterator

import jax

from jaxpar import certify, commands
from jaxpar.certification import command, comparison
from jaxpar.certification.checks import CHECKS, OTHER_DTYPES
from jaxpar.certification.results import Check, Result, Subject
from tests.kept_programs import keep_programs
from tests.mutants.running import HOME


def main(first: str, args: list[str]) -> None:
    """Run the command, which ends the process."""
    likeliest = first.split(",")
    place = lambda one: likeliest.index(one[0]) if one[0] in likeliest else len(likeliest)  # noqa: E731
    checks = sorted((one for one in CHECKS if one[0] != OTHER_DTYPES), key=place)
    comparison.Comparing.explained = lambda *_: ""  # type: ignore[method-assign, assignment]
    command.run_checks = lambda subject, _: until_failure(subject, checks)  # type: ignore[assignment]
    jax.config.update("jax_compilation_cache_dir", str(HOME / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    keep_programs()
    sys.argv[1:] = args
    commands.run(certify.__name__)


def until_failure(subject: Subject, checks: Iterable[tuple[str, Check]]) -> Iterator[list[Result]]:
    """Yield results up to the first that fails."""
    for name, run in checks:
        print(f"check: {name}", flush=True)
        for item in run(subject):
            found = item if isinstance(item, list) else [item]
            yield found
            if not all(result.passed for result in found):
                return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
