"""Every fault can be injected into the package as it is now, and the page tells of all of them."""

import ast
from collections import Counter

import pytest

from jaxpar.certification.meshes import parse_meshes
from jaxpar.commands import read
from tests.mutants import table
from tests.mutants.every import every_fault, read_results
from tests.mutants.fault import ROOT, Fault
from tests.mutants.running import CERTIFY

FAULTS = every_fault()


def test_names_are_unique_and_there_are_many():
    assert [name for name, n in Counter(fault.name for fault in FAULTS).items() if n > 1] == []
    assert len(FAULTS) >= 60
    assert len([fault for fault in FAULTS if fault.source != "own"]) >= 30


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_a_few_lines_of_code_that_is_there_once(fault: Fault):
    before = (ROOT / fault.file).read_text("utf-8")
    after = fault.applied(before)
    ast.parse(after)
    assert 1 <= len(set(after.splitlines()) - set(before.splitlines())) <= 6


def test_commands_and_tests_are_there():
    command = CERTIFY[1].removeprefix("jaxpar.")
    for args in {fault.certify: fault.command for fault in FAULTS}.values():
        options = read(command, [*CERTIFY[2:], *args])
        parse_meshes(options.mesh, options.config.asked(lambda *_: None).parallel)
    for test in {test for fault in FAULTS for test in fault.tests}:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text("utf-8"), test


def test_the_page_is_of_the_recorded_results():
    wanted = table.BEGIN + table.text(FAULTS, read_results()) + table.END
    assert wanted in table.PAGE.read_text("utf-8"), "run: python -m tests.mutants --page"
