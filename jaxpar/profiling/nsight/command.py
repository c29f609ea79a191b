"""Measure one kernel of a train step: python -m jaxpar.profile ncu CONFIG --kernel REGEX [...]

Runs the train step of a config under NVIDIA's Nsight Compute, as `python -m jaxpar.bench train`
does, and prints what limits the kernels whose name matches: the share of the time in which tensor
cores, multiprocessors, caches and device memory are busy, the measured occupancy, and what warps
wait for. Only these kernels are repeated. The step runs twice: first without ncu, under which a
compilation can end with a segmentation fault, and then from the compilation cache. ncu stops the
step once it has measured enough. All fields of the config can follow. docs/profiling.md explains
each figure.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called, read_config
from jaxpar.config.rules.limits import Range
from jaxpar.config.rules.paths import absolute
from jaxpar.profiling.nsight import counters
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.gpus import xla_flags
from jaxpar.runtime.options import Parser, check_file

#: Where NVIDIA's installers put the program, if it is not on PATH.
_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")

#: Flag of XLA that launches each kernel by itself, not in a CUDA graph. Kernels stay the same.
_NO_GRAPHS = "--xla_gpu_enable_command_buffer="

_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_PERMISSION_FIX = (
    "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
    "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)


def main(argv: Sequence[str]) -> None:
    """Run the command line, without its first word `ncu`."""
    options, step = read_command(argv)
    program = find_ncu(options.ncu)
    with tempfile.TemporaryDirectory(prefix="ncu-") as folder:
        report = absolute(options.report or Path(folder) / "kernel.ncu-rep")
        log = Path(folder) / "log.txt"
        print("compiling   the step, without ncu", flush=True)
        compile_step(step)
        print(f"measuring   {options.kernel}, under {program}", flush=True)
        words = ncu_words(program, options, step, report, log)
        code = subprocess.run(words, env=environment()).returncode
        text = as_csv(program, report)
        written = log.read_text("utf-8", "replace") if log.is_file() else ""
    try:
        kernels = counters.parse(text)
    except counters.NotCounters as error:
        check_log(written, code, program, options.kernel)
        raise RunError(f"{program} wrote no table of counters: {error}") from error
    if options.csv:
        Path(options.csv).write_text(text, "utf-8")
    print(counters.in_words(kernels))
    if len(kernels) < options.count:
        print(f"\n{len(kernels)} of {options.count} launches; ncu then ended with code {code}")
    if options.report:
        print(f"\nreport: {options.report}, for ncu-ui or: ncu --import {options.report}")


def read_command(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options.

    Returns:  the options, and the config with its overrides, which have been checked.
    """
    parser = Parser("python -m jaxpar.profile ncu", __doc__)
    add = parser.add_argument
    add("--kernel", metavar="REGEX", help="kernels to measure, such as nvjet, fusion, mosaic")
    parser.whole("--count", 1, Range(1, 1000, 1), help="launches to measure (1)")
    parser.whole("--skip", 0, Range(0, 1_000_000, 0), help="matching launches to skip first (0)")
    add("--full", action="store_true", help="measure everything, for ncu-ui")
    add("--report", metavar="FILE", help="file for ncu's report (.ncu-rep), to open in ncu-ui")
    add("--csv", metavar="FILE", help="file for all counters")
    add("--ncu", metavar="PATH", default="", help="the program, if it is not on PATH")
    options, step = parser.parse_known_args(argv)
    if not options.kernel:
        fix = "use --kernel nvjet for matmuls; `python -m jaxpar.profile RUN` lists names"
        raise ConfigError("--kernel", options.kernel, "is missing", as_called(fix))
    _check_regex(options.kernel)
    check_file("--report", options.report)
    check_file("--csv", options.csv)
    cfg = read_config(step, "jaxpar.profile ncu", __doc__)
    if not cfg.run.compilation_cache:
        rule = "is empty, but under ncu the step must come from the compilation cache"
        raise ConfigError("run.compilation_cache", "", rule, "remove it, or name a folder")
    return options, step


def _check_regex(text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        fix = "use a part of the name, such as --kernel nvjet"
        raise ConfigError("--kernel", text, f"is not a regular expression: {error}", fix) from None
    if re.search("nccl", text, re.IGNORECASE):
        rule = "selects collectives, which wait forever when one GPU repeats them"
        raise ConfigError("--kernel", text, rule, "choose kernels that compute")


def find_ncu(given: str) -> str:
    """Return the path of ncu.

    Raises:   ConfigError if it is not installed.
    """
    if given:
        if shutil.which(given) is None:
            raise ConfigError("--ncu", given, "is not a program", "give the path of ncu")
        return given
    if found := shutil.which("ncu"):
        return found
    places = sorted(place for text in _PLACES for place in Path("/").glob(text[1:]))
    if not places:
        rule = f"is not on PATH, nor at {' or '.join(_PLACES)}"
        fix = "install NVIDIA Nsight Compute (package nsight-compute), or use --ncu PATH"
        raise ConfigError("ncu", "", rule, fix)
    return str(places[-1])


def compile_step(step: Sequence[str]) -> None:
    """Run the step without ncu, so that its program is in the compilation cache.

    Raises:   RunError if it fails.
    """
    done = subprocess.run([*_bench(step), "--profile-steps", "0"], env=environment())
    if done.returncode:
        raise RunError(f"the step ended with code {done.returncode}, without ncu")


def environment() -> dict[str, str]:
    """Return the environment of both runs, which has to be the same for the compilation cache.

    All programs go into the cache: JAX leaves out those that compile in less than a second, such as
    the one that makes the weights. XLA takes GPU memory as it needs it: ncu saves what is allocated
    before it repeats a kernel, and XLA would allocate three quarters of the GPU.
    """
    return os.environ | {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"{xla_flags.user_flags()} {_NO_GRAPHS}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def _bench(step: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "jaxpar.bench", "train", *step, "--steps", "1"]


def ncu_words(
    program: str, options: argparse.Namespace, step: Sequence[str], report: Path, log: Path
) -> list[str]:
    """Return the command: ncu around one step, which `nsight/marked.py` marks.

    ncu watches only the step's own process, and ends it after the last launch to measure.
    """
    what = ["--set", "full"] if options.full else []
    what += [word for name in counters.SECTIONS for word in ("--section", name)]
    what += ["--metrics", ",".join(counters.METRICS)]
    return [
        *(program, "--target-processes", "application-only"),
        *("--profile-from-start", "off", "--kill", "yes"),
        *("--clock-control", "none", "--kernel-name", f"regex:{options.kernel}"),
        *("--launch-skip", str(options.skip), "--launch-count", str(options.count), *what),
        *("--export", str(report), "--force-overwrite", "--log-file", str(log)),
        *(*_bench(step), "--profile-steps", "1", "--profiler", "nvidia"),
    ]


def as_csv(program: str, report: Path) -> str:
    """Return the counters of a report, as CSV; empty if ncu wrote no report."""
    if not report.is_file():
        return ""
    words = [program, "--import", str(report), "--csv", "--page", "raw"]
    return subprocess.run(words, capture_output=True, text=True).stdout


def check_log(text: str, code: int, program: str, kernel: str) -> None:
    """Check what ncu wrote.

    Raises:   ConfigError if it has no permission, or no kernel matched. RunError if it failed.
    """
    if _NO_PERMISSION in text:
        rule = f"has no permission to read the GPU's counters ({_NO_PERMISSION})"
        raise ConfigError("ncu", program, rule, _PERMISSION_FIX)
    errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    if code or errors:
        why = " ".join(line.removeprefix("==ERROR==").strip() for line in errors)
        raise RunError(f"the step under {program} ended with code {code}. {why}".strip())
    if "No kernels were profiled" in text:
        fix = "use a name that `python -m jaxpar.profile RUN` lists, or a smaller --skip"
        raise ConfigError("--kernel", kernel, "matches no kernel of the step", as_called(fix))
