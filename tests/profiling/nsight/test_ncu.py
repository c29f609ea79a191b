"""The command around ncu: what it runs, what it reads and what it refuses. No ncu is needed."""

import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar import profile
from jaxpar.config import ConfigError
from jaxpar.profiling.nsight import command, counters
from jaxpar.runtime.exit_codes import RunError

RAW = Path(__file__).parent / "raw.csv"

#: A program with the interface of ncu: it notes its arguments, and prints a recorded table.
FAKE = """#!{python}
import os, pathlib, sys
folder = pathlib.Path({folder!r})
with (folder / "words").open("a") as file:
    file.write("\\n".join(sys.argv[1:]) + "\\n\\n")
if "--import" in sys.argv:
    print(pathlib.Path({raw!r}).read_text())
else:
    pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1]).write_text({log!r})
    if {measures}:
        pathlib.Path(sys.argv[sys.argv.index("--export") + 1]).touch()
    for name in ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "XLA_FLAGS"):
        with (folder / "environment").open("a") as file:
            file.write(os.environ[name] + "\\n")
    sys.exit({code})
"""


@pytest.fixture
def compiled(monkeypatch) -> list[list[str]]:
    """The steps that were compiled beforehand, in place of running them."""
    steps: list[list[str]] = []
    monkeypatch.setattr(command, "compile_step", lambda step: steps.append(list(step)))
    return steps


@pytest.fixture
def fake(tmp_path, compiled):
    """Makes a program that does as ncu."""

    def make(log: str = "==PROF== Profiling", code: int = 0, measures: bool = True) -> str:
        path = tmp_path / "ncu"
        fields = {"python": sys.executable, "folder": str(tmp_path), "raw": str(RAW)}
        path.write_text(FAKE.format(**fields, log=log, code=code, measures=measures))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def test_one_kernel_of_a_step(fake, compiled, tmp_path, capsys):
    words = ["ncu", "quickstart", "--kernel", "nvjet", "--skip", "3", "--train.seed", "7"]
    profile.main([*words, "--ncu", fake(), "--csv", str(tmp_path / "all.csv")])
    said = capsys.readouterr().out
    assert "nvjet_sm90_tst" in said and "tensor cores     88.2%" in said
    ran, read, *_ = (tmp_path / "words").read_text().split("\n\n")
    ran = ran.splitlines()
    at = lambda option: ran[ran.index(option) + 1]  # noqa: E731
    assert at("--profile-from-start") == "off" and at("--kernel-name") == "regex:nvjet"
    assert (at("--launch-skip"), at("--launch-count")) == ("3", "1")
    step = ran[ran.index("-m") :]
    assert step[:6] == ["-m", "jaxpar.bench", "train", "quickstart", "--train.seed", "7"]
    assert step[6:] == "--steps 1 --profile-steps 1 --profiler nvidia".split()
    assert read.splitlines()[0] == "--import" and read.splitlines()[1] == at("--export")
    assert compiled == [["quickstart", "--train.seed", "7"]], "without ncu, which may end it"
    assert (tmp_path / "all.csv").read_text().strip() == RAW.read_text().strip()


@pytest.mark.parametrize(
    ("log", "code", "error", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no", 1, ConfigError, "run as root, or load the driver"),
        ("==WARNING== No kernels were profiled.", 0, ConfigError, "matches no kernel of the step"),
        (
            "==ERROR== The application returned an error code (11).",
            11,
            RunError,
            "code 11. The app",
        ),
        ("", 2, RunError, "ended with code 2"),
    ],
)
def test_failures_of_ncu(log, code, error, said, fake):
    with pytest.raises(error, match=said):
        profile.main(["ncu", "quickstart", "--kernel", "nvjet", "--ncu", fake(log, code, False)])


def test_a_kernel_that_was_measured_is_shown_if_the_step_then_ends_badly(fake, capsys):
    """ncu ends the step itself; a crash after the last measured kernel costs nothing either."""
    step = ["quickstart", "--kernel", "nvjet", "--count", "9"]
    profile.main(["ncu", *step, "--ncu", fake("==ERROR== The application crashed", 11)])
    said = capsys.readouterr().out
    assert "tensor cores     88.2%" in said
    launches = len(counters.parse(RAW.read_text()))
    assert f"{launches} of 9 launches; ncu then ended with code 11" in said


def test_nothing_is_compiled_under_ncu(fake, tmp_path, monkeypatch):
    """Programs of less than a second come from the cache as well, and both runs share its key."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    profile.main(["ncu", "quickstart", "--kernel", "nvjet", "--ncu", fake()])
    flags = "--xla_gpu_autotune_level=2 --xla_gpu_enable_command_buffer="
    assert (tmp_path / "environment").read_text().splitlines() == ["0", flags]
    assert command.environment()["XLA_FLAGS"] == flags


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kernel", "["], "is not a regular expression"),
        (["--kernel", "ncclDevKernel"], "selects collectives"),
        ([], "is missing. Fix: use --kernel nvjet"),
        (["--kernel", "nvjet", "--count", "0"], "--count = 0: must be at least 1"),
        (["--kernel", "nvjet", "--ncu", "/no/ncu"], "is not a program"),
        (["--kernel", "nvjet", "--csv", "/dev/null/x"], "--csv"),
        (["--kernel", "nvjet", "--train.seeed", "1"], "train.seed"),
        (["--kernel", "nvjet", "--run.compilation-cache", ""], "must come from the compilation"),
    ],
)
def test_what_is_refused(words, said):
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        profile.main(["ncu", "quickstart", *words])


def test_where_ncu_is_not_installed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(command, "_PLACES", ("/nowhere/*/ncu",))
    with pytest.raises(ConfigError, match="install NVIDIA Nsight Compute"):
        command.find_ncu("")


def test_marks_are_balanced(monkeypatch):
    from jaxpar.profiling.nsight import marked

    calls: list[str] = []
    answer = lambda name: lambda *_: calls.append(name) or 0  # noqa: E731

    class Driver(SimpleNamespace):
        def __getattr__(self, name):
            return answer(name)

    monkeypatch.setattr(marked.ctypes, "CDLL", lambda _: Driver())
    with pytest.raises(ValueError, match="in a step"), marked.marked_for_nvidia():
        calls.append("step")
        raise ValueError("in a step")
    assert calls[calls.index("cuProfilerStart") :][:3] == [
        "cuProfilerStart",
        "step",
        "cuProfilerStop",
    ]
    assert calls.index("cuCtxPushCurrent_v2") < calls.index("cuProfilerStart")


def test_a_step_that_fails_is_not_measured(monkeypatch):
    ran = []
    failed = SimpleNamespace(returncode=2)
    run = lambda words, env: ran.append((words, env)) or failed  # noqa: E731
    monkeypatch.setattr(command.subprocess, "run", run)
    with pytest.raises(RunError, match="ended with code 2, without ncu"):
        command.compile_step(["quickstart"])
    words, env = ran[0]
    assert words[1:] == "-m jaxpar.bench train quickstart --steps 1 --profile-steps 0".split()
    assert env == command.environment()
