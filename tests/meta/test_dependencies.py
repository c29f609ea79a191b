"""Every package that jaxpar imports is declared, with what it is for, and no other."""

import ast
import functools
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.meta.test_packages import nodes_of

ROOT = Path(__file__).resolve().parents[2]

#: Modules whose package has another name.
PACKAGES = {
    "google": "protobuf",
    "huggingface_hub": "huggingface-hub",
    "lm_eval": "lm-eval",
    "ml_dtypes": "ml-dtypes",
    "mlflow": "mlflow-skinny",
    "jax_triton": "jax-triton",
    "orbax": "orbax-checkpoint",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
}

#: Packages that a command uses where the user has them, and does without otherwise.
IF_THERE = {"peft", "torch", "transformers"}

#: For tests, which write what published models are stored in; and what `jax_triton` calls.
NOT_IMPORTED = {"safetensors", "triton"}

#: PyTorch code, for users of `convert to-torch`.
TORCH = ROOT / "jaxpar" / "convert" / "torch_model.py"


@functools.cache
def imported() -> set[str]:
    """The packages that the package imports, wherever in a file."""
    found = set[str]()
    for file in sorted(set((ROOT / "jaxpar").rglob("*.py")) - {TORCH}):
        for node in nodes_of(file.read_text("utf-8")):
            match node:
                case ast.Import(names=names):
                    found |= {alias.name.partition(".")[0] for alias in names}
                case ast.ImportFrom(module=str(name), level=0):
                    found.add(name.partition(".")[0])
    return {PACKAGES.get(top, top) for top in found - {"jaxpar"} - sys.stdlib_module_names}


def declared(lines: list[str]) -> set[str]:
    """The names of packages in lists of dependencies."""
    return {line.replace(">", "[").replace("=", "[").partition("[")[0] for line in lines}


def test_imported_packages_are_declared_and_no_others():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    own = declared(project["dependencies"])
    extras = project["optional-dependencies"]
    users = [line for name, lines in extras.items() if name not in TOOLS for line in lines]
    assert imported() - own - declared(users) == IF_THERE
    assert own - imported() == set()
    assert declared(users) - imported() - NOT_IMPORTED == {"jaxpar"}  # an extra within one


#: Extras of people who work on jaxpar, or read its notebooks.
TOOLS = {"test", "dev", "docs", "notebooks"}


def test_every_dependency_says_what_it_is_for():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    lines = text.partition("dependencies = [\n")[2].partition("\n]")[0].splitlines()
    assert [line for line in lines if "#" not in line and '"jax' not in line] == []


def test_constraints_pin_what_is_declared_and_nothing_for_gpus():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pinned = {canonicalize_name(one.name): str(one.specifier) for one in pins}
    assert len(pinned) == len(pins) and all(pin.startswith("==") for pin in pinned.values())
    assert not [one for one in pinned if one.startswith(("jax-cuda", "nvidia-c"))]
    test = [line for line in extras["test"] if not line.startswith("jaxpar[")]
    for line in [*project["dependencies"], *test, *extras["hf"], *extras["wandb"]]:
        wanted = Requirement(line)
        assert pinned[canonicalize_name(wanted.name)].removeprefix("==") in wanted.specifier
