"""Tests run on 16 simulated CPU devices in full float32; with `-m gpu`, on the GPUs JAX finds.

With `-m gpu -n N`, each worker has one GPU, which others may share: most of a test is compilation
(14 workers on one H200, 16 cores: 333 tests in 262 s). `--maxschedchunk 1` has the longest tests,
which come first, in several workers: else one worker has them all.
"""

import contextlib
import functools
import gc
import importlib
import os
import platform
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

NUM_CPU_DEVICES = 16

#: A file of a GPU, with tests of up to 100 s.
LONGEST = "test_memory_gpu.py"

#: Examples of a test of properties, and in a run with the slow tests.
EXAMPLES, MORE_EXAMPLES = 25, 200


def wants_gpu(config: pytest.Config) -> bool:
    """Whether this run selects the `gpu` tests: `-m gpu`, but not `-m "not gpu"`."""
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")) is not None


def gpu_of_worker(worker: str, visible: str | None, count: int) -> str:
    """The GPU that one worker of pytest-xdist has, so that single-GPU tests run side by side.

    Args:     worker: its name, such as gw3. visible: CUDA_VISIBLE_DEVICES. count: GPUs of the host.
    """
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    return gpus[int(worker.removeprefix("gw")) % len(gpus)]


def pytest_configure(config: pytest.Config) -> None:
    """Choose the devices before any test module can start a backend."""
    write_to_memory()
    heed_signals()
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    keep_memory(starts_workers)
    if starts_workers:
        return  # pytest-xdist's workers have the tests, and start when this process is ready
    slow = not re.search(r"not slow\b", config.getoption("markexpr"))
    settings.register_profile(
        "jaxpar", max_examples=MORE_EXAMPLES if slow else EXAMPLES, deadline=None
    )
    settings.load_profile("jaxpar")
    if wants_gpu(config):
        from jaxpar.execution.xla_flag_table import ALWAYS
        from jaxpar.runtime.gpus.visible import visible_gpus

        for name, value in ALWAYS.items():
            os.environ.setdefault(name, value)
        # Trying kernels for each matmul took most of the time: eight workers on one H200 ran 11
        # tests of attention in 14 s without, and 10 of them in 72 s with it.
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_gpu_autotune_level" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(max(visible_gpus(), 1)))  # as programs do
        import jax  # a plugin may have imported it before, without this variable

        jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))
        # Schedules are compared with one reference, which is compiled once, as are the weights.
        jax.config.update("jax_compilation_cache_dir", str(config.rootpath / ".pytest_cache/gpu"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        worker, count = os.environ.get("PYTEST_XDIST_WORKER"), visible_gpus()
        if worker and count:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of_worker(worker, visible, count)
            # Workers share its memory: none takes most of it at once.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        simulate_devices(config)
    config.pluginmanager.import_plugin("tests.runs")  # imports JAX


#: A file system in memory, and the bytes that have to be free there. One test writes 300 MB; a test
#: leaves its files only if it fails.
MEMORY, LEAST_FREE = "/dev/shm", 2 << 30


def write_to_memory() -> None:
    """Have `tmp_path` in memory where there is such a file system, for pytest's workers too.

    Orbax makes the 70 files of a run's folder safe by about 200 calls of fsync: on a disk they took
    as long as all else that converting a tiny model does.
    """
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    there = os.statvfs(MEMORY)
    if there.f_bavail * there.f_frsize > LEAST_FREE and not there.f_flag & os.ST_NOEXEC:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = MEMORY


#: glibc's own: how much freed memory a process keeps, from which size on an array is given pages of
#: its own, by how much the heap grows, and that large pages may be used for it.
ALLOCATION = {
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def keep_memory(in_workers: bool) -> None:
    """Have pytest's workers keep the memory that they free; programs of tests are as users' are.

    XLA frees all that a compilation took, and the next one has the pages made again: a twelfth of
    the CPU time of compiling on meshes was the kernel's.

    Args:     in_workers: whether they are started from here. They have read these variables.
    """
    for name, value in ALLOCATION.items():
        if in_workers:
            os.environ.setdefault(name, value)
        elif os.environ.get(name) == value:
            del os.environ[name]


def heed_signals() -> None:
    """Undo `nohup` and a shell's `&`, which leave signals ignored here and in all children."""
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


def simulate_devices(config: pytest.Config) -> None:
    """Give this process, and programs that tests start, CPU devices only."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XDG_CACHE_HOME"] = str(config.rootpath / ".pytest_cache" / "home")
    # Programs that tests start read compiled modules, which this process writes.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(config.rootpath / ".pytest_cache" / "modules")
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ["PYTHONPYCACHEPREFIX"], False
    compile_quickly()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    jax.config.update("jax_default_matmul_precision", "highest")
    # As in the environment, if JAX was imported before.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_in_locations_limit", 1)
    # Compiling is most of a run. Its results are kept: in memory, and those of one device on disk,
    # where a damaged entry is compiled again, with a warning. Tracing, and what it checks, is kept
    # for whole runs of one config alone (tests/kept_steps.py).
    jax.config.update("jax_compilation_cache_dir", str(config.rootpath / ".pytest_cache" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    from tests.kept_programs import keep_programs

    keep_programs()


def compile_quickly() -> None:
    """Compile for CPUs, here and in programs that tests start, without what a tiny model can spare.

    Most of the time of a first run is compilation. XLA's own passes, its plan of buffers and its
    collectives stay as they are: only the machine code is simpler. A run of 40 steps on four
    devices took 12 CPU seconds instead of 22 (JAX 0.11.2). `make soak`, and a slow test in
    tests/e2e/test_processes.py, run programs as users compile them.
    """
    # LLVM's optimizations.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    # The callers of each operation in Python: a twelfth of the time of tracing and compilation.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"
    # XLA's own emitter lowers each fusion by a pipeline of MLIR; the one before it writes LLVM's IR
    # at once: gradients on three meshes took 13 CPU seconds instead of 24. A version of XLA without
    # the earlier emitter ignores the option.
    flags = ["--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"]
    # XLA cuts a program into 32 for the threads that compile it. Other tests have those cores:
    # gradients on five meshes took 11 CPU seconds to compile instead of 15.
    flags.append("--xla_cpu_parallel_codegen_split_count=1")
    if platform.machine() in ("x86_64", "AMD64"):
        # Without fused multiply-adds, which this emitter puts in other places in other programs:
        # a sum over processes then has the bits of a sum over devices.
        flags.append("--xla_cpu_max_isa=AVX")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))


def pytest_collection(session: pytest.Session) -> None:
    """Have every other worker import all tests from the last to the first, before it collects them.

    Each worker collects all. In a clean clone, compiling the modules, with pytest's assertions, is
    half of it: so one worker reads what another has just compiled.
    """
    worker, config = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), session.config
    if int(worker.removeprefix("gw")) % 2 and [Path(a).name for a in config.args] == ["tests"]:
        for path in sorted((config.rootpath / "tests").rglob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting reports it
                importlib.import_module(".".join(path.relative_to(config.rootpath).parts)[:-3])


def pytest_collection_finish() -> None:
    """Keep Python's garbage collector from what is imported, which stays, and mostly from what is
    traced, of which little is garbage."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, for which all would wait: those with most slow tests."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.name != LONGEST, -slow[item.path]))


def with_quick_weights():
    """Make initial weights by one program for all meshes (tests/weights.py), and fingerprints by
    none (tests/fingerprints.py); compile all without LLVM's optimizations on a GPU's host too.
    """
    from jaxpar.certification import traces
    from jaxpar.step import state
    from tests import fingerprints, weights

    quick = weights.optimizations(False), fingerprints.quickly_computed()
    with pytest.MonkeyPatch.context() as patch, quick[0], quick[1]:
        patch.setattr(state, "init_params", weights.init_params)
        patch.setattr(traces, "initial_params", weights.tree_of)
        yield


quick_compile = pytest.fixture(with_quick_weights)
quick_compile_of_module = pytest.fixture(with_quick_weights, scope="module")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A browser. Skips the test where there is none."""
    from tests import browser

    with browser.started(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def show(chromium):
    """Open a file in a browser, and return the page: tests/browser.py, `open_page`."""
    from tests import browser

    yield functools.partial(browser.open_page, chromium)
    for context in chromium.contexts:
        context.close()


@pytest.fixture(scope="session")
def devices(request: pytest.FixtureRequest) -> list:
    """The devices to build meshes of. On a `-m gpu` run without a GPU, an error."""
    import jax

    return jax.devices("gpu" if wants_gpu(request.config) else "cpu")
