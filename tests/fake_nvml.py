"""A driver in NVML's place: functions of `pynvml` answer for GPUs that a test describes.

Constants, structures and errors are those of the real package, and each call must fit the signature
of the real function. A healthy host is `h200s()`, written from NVML's documentation: not recorded.
"""

import contextlib
import inspect
import queue
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pynvml

#: Answers of a GPU, by the names of functions without "nvmlDeviceGet". An answer that depends on
#: arguments is a dict of them, or a function; an NVMLError is raised.
type Gpu = dict[str, Any]

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
#: What a driver says of a function that came after it.
NOT_FOUND = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
FORBIDDEN = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
NO_LIBRARY = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
NO_DRIVER = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

MIB = 1 << 20


def named(address: str, uuid: str) -> Gpu:
    """A GPU of which only its PCI address and UUID are known."""
    domain, bus, rest = address.split(":")
    device = rest.partition(".")[0]
    place = {"domain": int(domain, 16), "bus": int(bus, 16), "device": int(device, 16)}
    return {"UUID": uuid, "PciInfo": types.SimpleNamespace(**place)}


def memory(used_mib: int) -> Gpu:
    """The memory of an H200 as NVML tells it: version 2 leaves out what the driver reserves."""
    whole, used = 143771 * MIB, used_mib * MIB
    old = types.SimpleNamespace(total=whole, used=used + 600 * MIB)
    return {
        "MemoryInfo": {
            (): old,
            pynvml.nvmlMemory_v2: types.SimpleNamespace(**vars(old) | {"used": used}),
        }
    }


def fabric(state: int, status: int = 0, clique: int = 0) -> Gpu:
    """What Fabric Manager has done."""

    def tell(reference: Any) -> int:
        found = reference._obj
        assert found.version == pynvml.nvmlGpuFabricInfo_v2
        found.state, found.status, found.cliqueId = state, status, clique
        return pynvml.NVML_SUCCESS

    return {"GpuFabricInfoV": tell}


def nvlinks(count: int, down: Sequence[int] = (), to: Sequence[str] | None = None) -> Gpu:
    """NVLinks, of 26.562 GB/s as Hopper's.

    Args:     to: PCI addresses of the GPUs at the other ends; None: switches.
    """
    switch, gpu = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
    ends = [f"0000:{0xF0 + i % 4:02x}:00.0" for i in range(count)] if to is None else to

    def tell(fields: Sequence[tuple[int, int]]) -> list[Any]:
        found = []
        for field, link in fields:
            known = field == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED and link < count
            value = pynvml.c_nvmlFieldValue_t(fieldId=field, scopeId=link)
            value.nvmlReturn = pynvml.NVML_SUCCESS if known else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.value.uiVal = 26562 if known else 0
            found.append(value)
        return found

    return {
        "NvLinkState": {link: int(link not in down) for link in range(count)},
        "NvLinkRemoteDeviceType": dict.fromkeys(range(count), switch if to is None else gpu),
        "NvLinkRemotePciInfo": {i: named(end, "")["PciInfo"] for i, end in enumerate(ends)},
        "FieldValues": tell,
    }


def remapped(rows: int = 0, pending: bool = False, failed: bool = False) -> Gpu:
    """Rows of the memory that were replaced after uncorrectable errors."""
    return {"RemappedRows": (0, rows, int(pending), int(failed))}


def memory_errors(corrected: int = 0, uncorrected: int = 0, ever: int = 0) -> Gpu:
    """Memory errors since the driver was loaded, and uncorrected ones of the GPU's life."""
    one, both = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    now, always = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC
    return {
        "TotalEccErrors": {(one, now): corrected, (both, now): uncorrected, (both, always): ever}
    }


def h200(index: int, **changes: Any) -> Gpu:
    """A healthy H200 at rest, one of eight behind NVSwitch. Args:     changes: other answers."""
    sm, of_memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    uuid = f"GPU-{index:08d}-aaaa-bbbb-cccc-{index:012d}"
    ways = {i: pynvml.NVML_TOPOLOGY_HOSTBRIDGE for i in range(8)}
    return {
        **named(f"0000:{0x18 + 0x11 * index:02x}:00.0", uuid),
        "Name": "NVIDIA H200",
        "PowerUsage": 76410,
        "PowerManagementLimit": 700_000,
        "PowerManagementDefaultLimit": 700_000,
        "ClockInfo": {sm: 345, of_memory: 3201},
        "MaxClockInfo": {sm: 1980, of_memory: 3201},
        "CurrentClocksEventReasons": pynvml.nvmlClocksEventReasonGpuIdle,
        "Temperature": {pynvml.NVML_TEMPERATURE_GPU: 28 + index % 4},
        "PersistenceMode": pynvml.NVML_FEATURE_ENABLED,
        "MigMode": [pynvml.NVML_DEVICE_MIG_DISABLE] * 2,
        "ComputeMode": pynvml.NVML_COMPUTEMODE_DEFAULT,
        "EccMode": [pynvml.NVML_FEATURE_ENABLED] * 2,
        "MaxPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "TopologyCommonAncestor": ways,
        **memory(used_mib=1),
        **memory_errors(),
        **remapped(),
        **fabric(pynvml.NVML_GPU_FABRIC_STATE_COMPLETED),
        **nvlinks(18),
        **changes,
    }


def h200s(**changes: Any) -> list[Gpu]:
    """Eight H200s. Args:     changes: other answers of all of them."""
    return [h200(index, **changes) for index in range(8)]


class FakeNvml:
    """A driver. `installed` puts it in the place of the real one.

    gpus     in order; an NVMLError in the place of a GPU is raised for its handle.
    start    an error with which NVML does not start. system   answers without a GPU.
    opened   how often NVML is open. xids   errors to report: (index of the GPU, number).
    waited   set whenever a wait for errors ends without one.
    """

    def __init__(self, gpus: Sequence[Gpu | pynvml.NVMLError] = (), start: Any = None):
        self.gpus, self.start, self.opened = list(gpus), start, 0
        self.system = {"DriverVersion": "580.95.05", "CudaDriverVersion_v2": 13000}
        self.xids: queue.Queue[tuple[int, int]] = queue.Queue()
        self.waited = threading.Event()

    @contextlib.contextmanager
    def installed(self) -> Iterator["FakeNvml"]:
        """Answer instead of the functions of `pynvml` in this context."""
        names = [n for n in dir(pynvml) if n.startswith("nvml") and callable(getattr(pynvml, n))]
        functions = [n for n in names if inspect.isfunction(getattr(pynvml, n))]
        stands = {name: self._checked(name) for name in functions}
        with mock.patch.multiple(pynvml, **stands):
            yield self

    def _checked(self, name: str) -> Any:
        signature = inspect.signature(getattr(pynvml, name))

        def call(*arguments: Any) -> Any:
            signature.bind(*arguments)
            assert name == "nvmlInit" or self.opened, f"{name} while NVML is closed"
            if own := getattr(self, name, None):
                return own(*arguments)
            if name.startswith("nvmlSystemGet"):
                return self.system[name.removeprefix("nvmlSystemGet")]
            assert name.startswith("nvmlDeviceGet"), f"the fake has no {name}"
            return self._answer(name.removeprefix("nvmlDeviceGet"), *arguments)

        return call

    def _answer(self, name: str, handle: int, *arguments: Any) -> Any:
        answer = self.gpus[handle].get(name, NOT_SUPPORTED)
        if isinstance(answer, dict):
            key = arguments[0] if len(arguments) == 1 else arguments
            answer = answer.get(key, pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT))
        elif callable(answer):
            answer = answer(*arguments)
        if isinstance(answer, pynvml.NVMLError):
            raise answer
        return answer

    def nvmlInit(self):
        if self.start is not None:
            raise self.start
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        assert isinstance(index, int)
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if isinstance(self.gpus[index], pynvml.NVMLError):
            raise self.gpus[index]
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for index, gpu in enumerate(self.gpus):
            if uuid in (gpu["UUID"], *gpu.get("parts", ())):
                return ("part", index) if uuid.startswith("MIG-") else index
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        part, index = handle
        assert part == "part"
        return index

    def nvmlDeviceGetIndex(self, handle):
        return handle

    def nvmlDeviceGetTopologyCommonAncestor(self, handle, other):
        return self._answer("TopologyCommonAncestor", handle, other)

    def nvmlEventSetCreate(self):
        if any("no events" in gpu for gpu in self.gpus):
            raise NOT_SUPPORTED
        return []

    def nvmlDeviceRegisterEvents(self, handle, kinds, events):
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        events.append(handle)

    def nvmlEventSetWait_v2(self, events, milliseconds):
        assert events
        with contextlib.suppress(queue.Empty):
            device, xid = self.xids.get(timeout=milliseconds / 1e3)
            return types.SimpleNamespace(device=device, eventType=8, eventData=xid)
        self.waited.set()
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    def nvmlEventSetFree(self, events):
        events.clear()
