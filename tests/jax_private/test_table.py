"""JAX still has the private names that the package uses: which it lost, and what stood on them."""

import ast
import inspect
from pathlib import Path

import pytest

from jaxpar.jax_private import table
from tests.meta.test_packages import nodes_of

#: Modules that only `table.py` may name, and Pallas' Triton backend, which JAX will remove.
PRIVATE, DEPRECATED = ("jax._", "jaxlib._"), "jax.experimental.pallas.triton"

PACKAGE = Path(table.__file__).resolve().parents[1]


@pytest.mark.parametrize("private", table.TABLE, ids=lambda private: private.use)
def test_jax_has_the_names(private):
    private.load()


def test_functions_take_what_they_are_called_with():
    """Of functions in Python by their signature, of those in C++ by their text."""
    parameters = inspect.signature(table.MPMD.load()._mpmd_map).parameters
    assert {"input_output_aliases", "compiler_params", "interpret", "name"} <= set(parameters)
    (collectives,) = inspect.signature(table.CPU_CLIENT.load().make_cpu_client).parameters
    assert collectives == "collectives"
    said = table.GLOO.load().make_gloo_tcp_collectives.__doc__
    assert all(f"{name}:" in said for name in ("distributed_client", "hostname", "interface"))


def test_what_is_missing_is_named_with_what_stands_on_it():
    moved = table.PrivateModule("jax._src.core", ("Tracer", "nowhere.to_be"), "a use", "a reason")
    with pytest.raises(
        ImportError, match=r"has no nowhere\.to_be in jax\._src\.core.*: a use\. Fix"
    ):
        moved.load()
    gone = table.PrivateModule("jax._src.gone", ("one", "two"), "a use", "a reason")
    with pytest.raises(ImportError, match=r"has no one, two in jax\._src\.gone"):
        gone.load()


def test_the_package_imports_no_other_private_module():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(file.read_text("utf-8")):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            private = [name for name in names if name.startswith((*PRIVATE, DEPRECATED))]
            found += [f"{file.relative_to(PACKAGE)}: {name}" for name in private]
    assert not found
