"""A fault: a change of one to six lines of the package, in a form that survives its edits."""

import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A plausible fault, injected by replacing `old` with `new` in a file.

    name      what is wrong, as an identifier: the command and the table have it.
    file      below the root of the repository.
    old, new  code. `old` occurs exactly once in the file; `new` leaves a file that parses.
    source    a public report, "PROJECT NUMBER", that had the same fault; "own" for none.
    certify   what should find it: CONFIG, meshes, then options, as on the command line.
    tests     pytest's names of tests that should find it where that command cannot.
    """

    name: str
    file: str
    old: str
    new: str
    certify: str
    source: str = "own"
    tests: tuple[str, ...] = ()

    def applied(self, text: str) -> str:
        """Return a file's text with the fault. Raises: ValueError if `old` is not there once."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: `old` occurs {found} times in {self.file}, not once")
        return text.replace(self.old, self.new)

    @property
    def command(self) -> list[str]:
        """The arguments of the command that should find it: CONFIG, then options."""
        config, *rest = shlex.split(self.certify)
        first = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
        meshes = [word for mesh in rest[:first] for word in ("--mesh", mesh)]
        return [config, *meshes, *rest[first:]]
