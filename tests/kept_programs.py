"""Compiled programs, kept in memory for as long as a test process runs, and some of them on disk.

Most of a run's time is compilation, and tests of one file lower the same programs again and again:
each makes its own step. JAX's persistent cache alone would not do. A CPU program that is read back
from it has lost the order of collectives in different computations, such as a branch and what
surrounds it (jaxlib 0.11.2): the ranks of a group may then sum different arrays, without an error,
or crash. A program in memory is the one that was compiled.
"""

from collections import OrderedDict
from typing import Any

from jax._src import compiler

#: Programs in memory. A step of a tiny model takes about 2 MB.
MOST = 256

KEPT: OrderedDict[str, Any] = OrderedDict()


def keep_programs() -> None:
    """Have this process compile a program once, and read from disk only those of one device.

    The keys are those of JAX's persistent cache, which has to be on: of the program, the compiler's
    options, the versions and the devices.
    """
    read, write, key_of = compiler._cache_read, compiler._cache_write, compiler._get_cache_key

    def key_or_none(options: Any, *where: Any, computation: Any, **how: Any) -> str | None:
        if calls_python(computation):
            return None
        return key_of(options, *where, computation=computation, **how)

    def read_kept(name: str, key: str, options: Any, *where: Any) -> tuple[Any, int | None]:
        if key in KEPT:
            KEPT.move_to_end(key)
            return KEPT[key], 0
        if has_several_devices(options):
            return None, None
        return read(name, key, options, *where)

    def write_kept(key: str, seconds: float, name: str, backend: Any, program: Any) -> None:
        if not hasattr(program, "local_devices"):  # compiled for devices that are not here
            return write(key, seconds, name, backend, program)
        KEPT[key] = program
        if len(KEPT) > MOST:
            KEPT.popitem(last=False)
        if len(program.local_devices()) == 1:
            write(key, seconds, name, backend, program)
        return None

    compiler._cache_read, compiler._cache_write = read_kept, write_kept
    compiler._get_cache_key = key_or_none


def calls_python(computation: Any) -> bool:
    """Whether a program calls Python functions. They are not part of it: it names them by number,
    so that programs of different functions, such as interpreted kernels, look alike."""
    return "_callback(" in computation.operation.get_asm(large_elements_limit=4)


def has_several_devices(options: Any) -> bool:
    """Whether a program compiled with these options runs on several devices."""
    assigned = options.device_assignment
    return assigned.replica_count() * assigned.computation_count() > 1
