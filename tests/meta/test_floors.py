"""The package keeps its floors, and files and functions stay short enough to read.

A file imports only from its own floor or a lower one. The table below is the whole rule.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Floor of each module or package directly under jaxpar/; a package's modules share its floor.
FLOORS = {
    0: "axes lines whole_file json_lines config config_json config_metrics config_model "
    "config_types params batch validation memory_rules model_rules data_rules guard_rules "
    "lora_rules layout_rules metrics_rules metric_names cluster extensions",
    1: "parallel kernels xla_flags runtime provenance processes nccl_ras nvidia_smi",
    2: "model",
    3: "optimizer moments skipping state adapters initial startup step data checkpoint metrics "
    "profiling guard goodput evaluation rewinding recent replicas step_guard run_lock stragglers "
    "watchdog elastic children convert generation scoring loaded harness parity planning sinks "
    "samples json_file",
    4: "cli run train evaluate sample verify quickstart launch plan doctor bench report replay "
    "profile",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}
PROGRAMS = 4

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "misc"}


def floor_of(module: str) -> int | None:
    """Floor of a dotted module; None if the table lacks it. A package's program is a program."""
    parts = module.split(".")
    if len(parts) == 1:
        return 0
    if parts[-1] == "__main__":
        return PROGRAMS
    return FLOOR_OF.get(parts[1])


def module_of(file: Path) -> str:
    """Dotted name of a file of the package; a package's __init__.py has the package's name."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def jaxpar_imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import of jaxpar, wherever in the file, relative ones too.

    `from jaxpar.a import b` gives "jaxpar.a.b", whether b is a module or something within one.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and is_import_call(node):
            names = [node.args[0].value]
        yield from ((node.lineno, n) for n in names if n.split(".")[0] == "jaxpar")


def is_import_call(call: ast.Call) -> bool:
    """Whether it is importlib.import_module("...") or __import__("...")."""
    match call:
        case ast.Call(args=[ast.Constant(value=str()), *_]):
            return ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__")
    return False


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """One message for each import of a higher floor, or of a module that the table lacks."""
    own = floor_of(module)
    if own is None:
        return [f"{module}: on no floor; add it to FLOORS in tests/meta/test_floors.py"]
    wrong = []
    for line, name in jaxpar_imports(source, module, is_package):
        floor = floor_of(name)
        if floor is None and name.split(".")[1].startswith("__"):
            continue  # jaxpar.__version__
        if floor is None:
            wrong.append(f"{module}:{line}: imports {name}, which is on no floor; add it to FLOORS")
        elif floor > own:
            wrong.append(f"{module}:{line}: floor {own} imports {name} from floor {floor}")
    return wrong


def package_files() -> list[Path]:
    """Every Python file of the package."""
    files = sorted((ROOT / "jaxpar").rglob("*.py"))
    assert ROOT / "jaxpar" / "axes.py" in files, f"no package found under {ROOT}"
    return files


def python_files() -> list[Path]:
    """Every Python file that people read: the package, configs, scripts and tests."""
    others = [f for d in ("configs", "scripts", "tests") for f in (ROOT / d).rglob("*.py")]
    return package_files() + sorted(others)


def long_functions(source: str) -> list[tuple[int, str, int]]:
    """Line, name and length of each function past the limit, docstring and inner functions in."""
    functions = (
        (node.lineno, node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [f for f in functions if f[2] > MAX_FUNCTION_LINES]


def test_no_import_goes_up():
    wrong = []
    for file in package_files():
        source = file.read_text(encoding="utf-8")
        wrong += upward_imports(source, module_of(file), file.name == "__init__.py")
    assert not wrong, "\n" + "\n".join(wrong)


def test_an_upward_import_is_seen_however_it_is_written():
    for source in (
        "import jaxpar.train",
        "import jaxpar.model.layers as layers",
        "from jaxpar import step",
        "from jaxpar.step import make_train_step",
        "from ..model import layers",
        "from .. import cli",
        "def late():\n    from jaxpar.model.layers import rms_norm",
        "if TYPE_CHECKING:\n    from jaxpar.state import TrainState",
        "importlib.import_module('jaxpar.data.loader')",
    ):
        assert len(upward_imports(source, "jaxpar.parallel.mesh")) == 1, source
    assert len(upward_imports("from ..model import layers", "jaxpar.parallel", True)) == 1
    assert len(upward_imports("from .model import layers", "jaxpar", True)) == 1
    assert len(upward_imports("from jaxpar.cli import run", "jaxpar.data.tokens")) == 1


def test_imports_on_the_same_floor_and_down_are_allowed():
    for source in (
        "import jax, jaxpar",
        "from jaxpar import __version__, axes, config",
        "from jaxpar.kernels.attention import reference",
        "from . import collectives",
        "from .collectives import psum",
        "from ..kernels import attention",
        "from jaxparallel.train import anything",
    ):
        assert upward_imports(source, "jaxpar.parallel.mesh") == [], source
    assert upward_imports("from .model import layers", "jaxpar.parallel", is_package=True) == []
    assert upward_imports("from jaxpar.cli import run", "jaxpar.data.__main__") == []


def test_a_module_outside_the_table_is_refused():
    assert "add it to FLOORS" in upward_imports("", "jaxpar.newcomer")[0]
    assert "add it to FLOORS" in upward_imports("import jaxpar.newcomer", "jaxpar.train")[0]


def test_files_are_short():
    lengths = [(len(f.read_text(encoding="utf-8").splitlines()), f) for f in python_files()]
    long = [f"{f.relative_to(ROOT)}: {n} lines" for n, f in lengths if n > MAX_FILE_LINES]
    assert not long, f"past {MAX_FILE_LINES} lines, split by concern:\n" + "\n".join(long)


def test_functions_are_short():
    long = [
        f"{file.relative_to(ROOT)}:{line} {name}: {length} lines"
        for file in python_files()
        for line, name, length in long_functions(file.read_text(encoding="utf-8"))
    ]
    assert not long, f"past {MAX_FUNCTION_LINES} lines:\n" + "\n".join(long)
    assert long_functions("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES)
    assert not long_functions("def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1))


def test_names_say_what_is_inside():
    vague = [
        str(file.relative_to(ROOT))
        for file in python_files()
        if VAGUE_NAMES & {part.removesuffix(".py") for part in file.relative_to(ROOT).parts}
    ]
    assert not vague, f"name what is inside instead: {vague}"
