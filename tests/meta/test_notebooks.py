"""The notebooks run from a fresh kernel, and are committed with what they put out."""

import ast
import importlib.util
import json
import os
import re

import pytest

from tests.meta.test_repository import HOME_PATH, ROOT, broken_links

nbformat = pytest.importorskip("nbformat")  # `jaxpar[notebooks]`, with what runs them
pytest.importorskip("nbclient")

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

#: The largest mean size of a notebook, pictures included.
MAX_BYTES = 130_000

#: Where some machine keeps its things.
MACHINE_PATH = re.compile(HOME_PATH.pattern + r"|(?<![\w.~*}$/-])/(?:tmp|usr|opt|var|mnt)/[\w.~-]")


def load_script():
    spec = importlib.util.spec_from_file_location(
        "run_notebooks", ROOT / "scripts" / "docs" / "run_notebooks.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


SCRIPT = load_script()


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell) -> str:
    """All that a cell put out as text."""
    parts = [o.get("text", "") + "".join(o.get("traceback", [])) for o in cell.outputs]
    parts += [v for o in cell.outputs for k, v in o.get("data", {}).items() if k.startswith("text")]
    return "\n".join(parts)


def problems(notebook) -> list[str]:
    """What a committed notebook must not be."""
    cells, found = code_cells(notebook), []
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("not run from top to bottom in one go")
    if any(o.output_type == "error" for cell in cells for o in cell.outputs):
        found.append("a cell raised")
    if any(o.get("name") == "stderr" for cell in cells for o in cell.outputs):
        found.append("a warning, or other text on stderr")
    if not any(cell.outputs for cell in cells):
        found.append("no outputs")
    if paths := [m[0] for cell in cells for m in MACHINE_PATH.finditer(texts(cell))]:
        found.append(f"a machine's path: {paths[0]}")
    return found


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_committed_outputs(file):
    notebook = SCRIPT.read(file)
    assert problems(notebook) == []
    assert SCRIPT.tidy(notebook) == notebook, "run python scripts/docs/run_notebooks.py"
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert broken_links(file, prose) == []
    assert prose.startswith("# ") and "You will see" in prose


def test_the_index_names_every_notebook_and_the_folder_is_small():
    assert len(NOTEBOOKS) >= 1
    index = (ROOT / "docs" / "python_api.md").read_text("utf-8")
    assert [f.name for f in NOTEBOOKS if f"(notebooks/{f.name})" not in index] == []
    files = [f for f in FOLDER.iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) < MAX_BYTES * len(NOTEBOOKS)


@pytest.fixture
def own_environment(monkeypatch):
    """Kernels choose their devices themselves, and import this package."""
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_what_it_imports_of_the_package_is_there(file):
    source = "\n".join(cell.source for cell in code_cells(SCRIPT.read(file)))
    trees = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [(n.module, a.name) for n in trees for a in n.names if n.module.startswith("jaxpar")]
    assert len(ours) > 3 or source.count("jaxpar.") > 3
    for module, name in ours:
        found = importlib.import_module(module)
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_files_of_the_repository_that_it_reads_are_there(file):
    source = "\n".join(cell.source for cell in code_cells(SCRIPT.read(file)))
    named = re.findall(r"REPOSITORY / \"([^\"]+)\"", source)
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert source.count("REPOSITORY /") == len(named)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other processes on two cores
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_it_runs_from_a_fresh_kernel(file, own_environment):
    committed = SCRIPT.read(file)
    assert SCRIPT.lacking(committed, SCRIPT.run(committed)) == []


def test_a_cell_that_raises_is_a_failure(tmp_path, monkeypatch, capsys, own_environment):
    cell = nbformat.v4.new_code_cell("print('before')\n1 / 0")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "07_wrong.ipynb")
    monkeypatch.setattr(SCRIPT, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["run_notebooks.py", "07", "--check"])
    assert SCRIPT.main() == 1
    said = capsys.readouterr().out
    assert "07_wrong.ipynb: failed" in said and "ZeroDivisionError" in said


def test_a_name_that_is_no_notebooks(capsys):
    with pytest.raises(SystemExit) as stop:
        SCRIPT.notebooks(["99"])
    assert stop.value.code == 2
    assert "no notebook begins with '99'. Fix: name some of 01_" in capsys.readouterr().err


def test_what_is_missing_is_seen():
    run = nbformat.v4.new_code_cell("print(1)", execution_count=1)
    run.outputs = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]
    fresh = SCRIPT.tidy(nbformat.v4.new_notebook(cells=[run]))
    assert problems(fresh) == [] and SCRIPT.lacking(fresh, fresh) == []
    bare = nbformat.from_dict(json.loads(json.dumps(fresh)))
    bare.cells[0].outputs, bare.cells[0].execution_count = [], None
    assert problems(bare) == ["not run from top to bottom in one go", "no outputs"]
    assert SCRIPT.lacking(bare, fresh) == ["cell 0: committed outputs [], a run gives ['stdout']"]
    home = "/".join(["", "home", "me", "run"])
    fresh.cells[0].outputs[0].text = f"wrote {home}\n"
    assert problems(fresh) == [f"a machine's path: {home[:7]}"]
