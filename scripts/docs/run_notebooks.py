"""Runs the notebooks of docs/notebooks, each in a fresh kernel.

    python scripts/docs/run_notebooks.py                  run all and store their outputs
    python scripts/docs/run_notebooks.py 01 04 --check    run these two without writing

Names are beginnings of file names. The exit code is 1 where a cell raises or takes too long; with
--check also where an output is not committed, or a file is not as this script writes it.
"""

import argparse
import copy
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"

#: All that a file says about itself: nothing that depends on who ran it, and when.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class OwnKernel(AsyncKernelManager):
    """A kernel of this interpreter, which communicates through files instead of ports."""

    def __init__(self, **options):
        # Without kernel folders, the only kernel is the interpreter's own.
        specs = KernelSpecManager(kernel_dirs=[])
        self.sockets = tempfile.TemporaryDirectory(prefix="kernel-")
        where = f"{self.sockets.name}/socket"  # a relative one would lie in the kernel's folder
        super().__init__(kernel_spec_manager=specs, transport="ipc", ip=where, **options)


#: Seconds that a cell may take.
TIMEOUT = 900.0

#: What IPython colors tracebacks with.
COLOUR = re.compile(r"\x1b\[[\d;]*m")


def notebooks(names: list[str]) -> list[Path]:
    """Return the notebooks whose file names start with `names`; all if there are none."""
    there = sorted(FOLDER.glob("*.ipynb"))
    unknown = [n for n in names if not any(f.name.startswith(n) for f in there)]
    if unknown:
        known = ", ".join(f.stem for f in there)
        why = f"error: no notebook begins with {unknown[0]!r}. Fix: name some of {known}."
        print(why, file=sys.stderr)
        sys.exit(2)
    return [f for f in there if not names or f.name.startswith(tuple(names))]


def read(file: Path) -> NotebookNode:
    """Read a notebook.

    Raises:   nbformat.ValidationError if it is damaged.
    """
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    return notebook


def run(notebook: NotebookNode, timeout: float = TIMEOUT) -> NotebookNode:
    """Run a copy of the notebook in a fresh kernel, in its folder.

    Args:     timeout: most seconds per cell.
    Raises:   CellExecutionError with the traceback if a cell raises; CellTimeoutError.
    """
    done = copy.deepcopy(notebook)
    client = NotebookClient(
        done,
        kernel_name="python3",
        kernel_manager_class=OwnKernel,
        timeout=timeout,
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    return tidy(done)


def tidy(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook as committed: merged streams, no metadata of the run."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Merge adjacent outputs of a stream: how they are split depends on timing."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and last.output_type == "stream" == output.output_type and last.name == output.name:
            last.text += output.text
        else:
            output.pop("transient", None)
            joined.append(output)
    return joined


def lacking(committed: NotebookNode, fresh: NotebookNode) -> list[str]:
    """Return how the committed notebook differs from a fresh run."""
    found = [] if tidy(committed) == committed else ["not formatted by this script"]
    for number, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=True)):
        if new.cell_type == "code" and kinds(new) != kinds(old):
            found.append(f"cell {number}: committed outputs {kinds(old)}, a run gives {kinds(new)}")
    return found


def kinds(cell: NotebookNode) -> list[str]:
    """Return the kinds of a cell's outputs: names of streams and types of results."""
    return [o.name if o.output_type == "stream" else ",".join(sorted(o.data)) for o in cell.outputs]


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="notebooks to run (all)")
    add("--check", action="store_true", help="compare without writing")
    add("--timeout", type=float, default=TIMEOUT, help="most seconds per cell (%(default)s)")
    options = parser.parse_args()
    failed = False
    for file in notebooks(options.names):
        began = time.perf_counter()
        committed = read(file)
        try:
            fresh = run(committed, options.timeout)
        except (CellExecutionError, CellTimeoutError) as error:
            print(f"{file.name}: failed\n{COLOUR.sub('', str(error))}")
            failed = True
            continue
        problems = lacking(committed, fresh) if options.check else []
        if not options.check:
            nbformat.write(fresh, file)
        verdict = "; ".join(problems) or ("ok" if options.check else "written")
        print(f"{file.name}: {verdict}, {time.perf_counter() - began:.0f} s", flush=True)
        failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
