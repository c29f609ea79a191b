"""CPU seconds of each test: which of them make the whole run long.

    python -m pytest -p tests.cpu_seconds tests/meshes

The seconds are of the test's process, all its threads, and of the programs that it started and
that have ended: another load of the machine changes them little. The first test that uses a fixture
or compiles a program pays for it. With pytest-xdist, each worker's tests are in the same table;
with --junitxml, the seconds are a property of each test.
"""

import resource
from collections import Counter

import pytest

#: How many tests and files are shown.
SHOWN = 40

#: The property that a test's report carries, from a worker, too.
PROPERTY = "cpu_seconds"

SECONDS: Counter[str] = Counter()

#: Seconds at the end of the test before.
LAST = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """CPU seconds so far of this process and of those that it started."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Give each phase's report the seconds since the test before: the last one has them all."""
    report = yield
    now = cpu_seconds()
    report.user_properties.append((PROPERTY, now - item.config.stash.setdefault(LAST, now)))
    if call.when == "teardown":
        item.config.stash[LAST] = now
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave out what importing and collecting took."""
    session.config.stash[LAST] = cpu_seconds()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the seconds of a test so far."""
    SECONDS[report.nodeid] = dict(report.user_properties).get(PROPERTY, 0.0)


def pytest_terminal_summary(terminalreporter) -> None:
    """Write the longest tests, files and folders."""
    files, folders = Counter(), Counter()
    for name, seconds in SECONDS.items():
        file = name.split("::")[0]
        files[file] += seconds
        folders[file.rpartition("/")[0]] += seconds
    terminalreporter.section(f"{sum(SECONDS.values()):,.0f} CPU seconds")
    for table in (folders, files, SECONDS):
        for name, seconds in table.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        terminalreporter.write_line("")
