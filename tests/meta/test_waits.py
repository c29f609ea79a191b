"""Tests that wait are marked, and none requires that something is over within a time."""

import ast
import re
from pathlib import Path

from tests.meta.test_repository import ROOT

FILES = sorted(set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)})

#: A call that waits for something else to happen.
WAITS = re.compile(
    r"wait_for\(|\bThread\(|threading\.(?:Timer|Event|Semaphore|Condition)|Popen\("
    r"|ranks\.(?:launch|finish)|\bshow\(|\.communicate\("
)

#: An upper bound on a time that was measured: a busy machine exceeds any.
WITHIN = re.compile(
    r"assert\b[^\n]*(?:monotonic|perf_counter|time\.time)\(\) - \w+\)?[^\n]* <=? *[\w.]+ *$", re.M
)

#: Tests of a limit that is JAX's own, on namespaces of this host.
LIMITS = ("e2e/hosts/test_hosts.py", "e2e/hosts/test_elastic_hosts.py")


def unmarked(text: str) -> list[str]:
    """Names of the tests that wait, and have no marker."""
    if re.search(r"^pytestmark = [^=]*mark\.waits", text, re.M):
        return []
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(map(ast.unparse, node.decorator_list))
            if WAITS.search(ast.get_source_segment(text, node) or "") and "waits" not in marks:
                found.append(node.name)
    return found


def test_tests_that_wait_are_marked():
    found = {path.name: unmarked(path.read_text("utf-8")) for path in FILES}
    assert not {path: names for path, names in found.items() if names}


def test_no_test_requires_that_something_is_over_within_a_time():
    inside = lambda path: str(path.relative_to(ROOT / "tests"))  # noqa: E731
    found = {
        inside(path): WITHIN.findall(path.read_text("utf-8"))
        for path in FILES
        if inside(path) not in LIMITS
    }
    assert not {path: lines for path, lines in found.items() if lines}


def test_both_are_seen():
    waits = "def test_a():\n    wait_for(lambda: 1)\n"
    assert unmarked(waits) == ["test_a"]
    assert unmarked("import pytest\n@pytest.mark.waits\n" + waits) == []
    assert unmarked("pytestmark = pytest.mark.waits\n" + waits) == []
    assert WITHIN.search("    assert time.monotonic() - began < 10\n")
    assert not WITHIN.search("    assert time.monotonic() - began >= 0.3\n")
