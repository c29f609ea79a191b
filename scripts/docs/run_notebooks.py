"""Run the notebooks of docs/notebooks, each from a fresh kernel.

    python scripts/docs/run_notebooks.py                  run all, and write their outputs into them
    python scripts/docs/run_notebooks.py 01 04 --check    run these two, and write nothing

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
    """A kernel of this interpreter, whichever others are installed; spoken to by files, no port."""

    def __init__(self, **options):
        # Without folders to look in, the only kernel is the interpreter's own.
        specs = KernelSpecManager(kernel_dirs=[])
        self.sockets = tempfile.TemporaryDirectory(prefix="kernel-")
        where = f"{self.sockets.name}/socket"  # a relative one would lie in the kernel's folder
        super().__init__(kernel_spec_manager=specs, transport="ipc", ip=where, **options)


#: Seconds that a cell may take.
TIMEOUT = 900.0

#: What IPython colors tracebacks with.
COLOUR = re.compile(r"\x1b\[[\d;]*m")


def notebooks(names: list[str]) -> list[Path]:
    """The notebooks whose file names begin so; without names, all of them."""
    there = sorted(FOLDER.glob("*.ipynb"))
    unknown = [n for n in names if not any(f.name.startswith(n) for f in there)]
    if unknown:
        known = ", ".join(f.stem for f in there)
        why = f"error: no notebook begins with {unknown[0]!r}. Fix: name some of {known}."
        print(why, file=sys.stderr)
        sys.exit(2)
    return [f for f in there if not names or f.name.startswith(tuple(names))]


def read(file: Path) -> NotebookNode:
    """A notebook's content. Raises nbformat's ValidationError for a damaged one."""
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    return notebook


def run(notebook: NotebookNode, timeout: float = TIMEOUT) -> NotebookNode:
    """A copy of the notebook, run in a fresh kernel of this interpreter, in its folder.

    Args:     timeout: seconds that one cell may take.
    Raises:   CellExecutionError, with the traceback, where a cell raises; CellTimeoutError.
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
    """The notebook as it is committed: a stream in one piece, no traces of who ran it."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Neighboring pieces of one stream as one: how they are cut depends on timing."""
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
    """What the committed notebook does not have: outputs that a run gives, and tidiness."""
    found = [] if tidy(committed) == committed else ["not as this script writes it"]
    for number, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=True)):
        if new.cell_type == "code" and kinds(new) != kinds(old):
            found.append(f"cell {number}: committed outputs {kinds(old)}, a run gives {kinds(new)}")
    return found


def kinds(cell: NotebookNode) -> list[str]:
    """What a cell puts out: names of streams, and kinds of results."""
    return [o.name if o.output_type == "stream" else ",".join(sorted(o.data)) for o in cell.outputs]


def main() -> int:
    """The command line. Returns an exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which; without, all of them")
    add("--check", action="store_true", help="write nothing; compare")
    add("--timeout", type=float, default=TIMEOUT, help="seconds a cell may take (%(default)s)")
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
