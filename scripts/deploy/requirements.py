"""Print the dependencies in pyproject.toml with those of some extras, for pip's -r.

    python scripts/deploy/requirements.py cuda13,hf

The Dockerfile installs them before it copies the code: its layer stays while only the code changes.
An extra may name others, as `test` does: jaxpar[parquet,hf].
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> list[str]:
    """Return the requirements of a project with some extras, each once.

    Raises:   KeyError for an extra that the project does not have.
    """
    found = list(project["dependencies"])
    waiting = list(extras)
    seen = set()
    while waiting:
        extra = waiting.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", line.replace(" ", ""))
            if own:
                waiting += own[1].split(",")
            else:
                found.append(line)
    return list(dict.fromkeys(found))


def main() -> None:
    """The command line."""
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    extras = [extra for extra in sys.argv[1].split(",") if extra]
    known = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in known]:
        sys.exit(f"no extra {', '.join(unknown)}; there are {', '.join(known)}")
    print("\n".join(requirements(project, extras)))


if __name__ == "__main__":
    main()
