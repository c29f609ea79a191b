"""Facts about this host's GPUs, which the driver tells through its library NVML.

Each reading opens NVML and closes it again. Reading changes nothing on a GPU.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pynvml

NO_LIBRARY = "there is no NVIDIA driver: its library libnvidia-ml.so.1 was not found"

#: Bits of `clock_event_reasons` other than idling and the power limit: name, and whether it is a
#: hardware slowdown. Source: NVML, nvmlClocksEventReasons.
REASONS = {
    pynvml.nvmlClocksEventReasonHwSlowdown: ("hardware slowdown", True),
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: ("software thermal slowdown", False),
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: ("hardware thermal slowdown", True),
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: ("power brake by the host", True),
}

COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "Default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "Exclusive_Thread",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "Prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "Exclusive_Process",
}

#: Whether Fabric Manager has registered a GPU. Those without NVSwitch have no state.
FABRIC_STATES = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "Not Started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "In Progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "Completed",
}

#: What two GPUs have in common on PCIe, by the names of `nvidia-smi topo -m`: from a single bridge
#: to the link between sockets.
PCIE_WAYS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}

#: Counters of memory errors: their type, and since when they count.
CORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC
UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
ALL_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC

#: What an NVLink may lead to other than NVSwitch.
NOT_SWITCHES = (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU)


class Unavailable(Exception):
    """There is no driver, it does not respond, or it has lost a GPU. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """What changes under load. None: the GPU or its driver does not tell it.

    index         in the order of PCI addresses.
    power_draw    in W, mean of the last second. sm_clock   in MHz. temperature   in °C.
    clock_event_reasons   why the clocks are not higher, as bits.
    """

    index: int
    uuid: str
    power_draw: float | None = None
    sm_clock: int | None = None
    clock_event_reasons: int | None = None
    temperature: int | None = None

    @property
    def throttle_reasons(self) -> list[tuple[str, bool]]:
        """The reasons for reduced clocks: names, and whether the hardware slows down."""
        active = self.clock_event_reasons or 0
        return [why for bit, why in REASONS.items() if bit & active]

    @property
    def at_power_limit(self) -> bool:
        """Whether the power limit reduces the clocks, as in every large matmul."""
        return bool(pynvml.nvmlClocksEventReasonSwPowerCap & (self.clock_event_reasons or 0))


@dataclass(frozen=True, kw_only=True)
class GpuFacts(GpuLoad):
    """All that is read of a GPU. None: the GPU or its driver does not tell it.

    address       on PCI, as the kernel writes it: 0000:18:00.0.
    memory_total, memory_used   in bytes; the driver's own memory is not in use.
    power_limit, default_power_limit   in W. max_sm_clock, memory_clock, max_memory_clock   in MHz.
    ecc           whether memory errors are corrected. corrected_errors, uncorrected_errors   since
                  the driver was loaded. all_uncorrected_errors   of the GPU's life.
    remapped_rows   rows of the memory that spare ones replaced after uncorrectable errors.
    remapping_pending, remapping_failed   whether a row waits for a reset, or had no spare row.
    pcie_generation   the newest that GPU and host have. pcie_width, max_pcie_width   in lanes.
    fabric_state   of FABRIC_STATES. fabric_status   "Success", or NVML's error, once completed.
    nvlinks       GB/s of each NVLink in one direction; 0: not known; None: the link is down.
    """

    name: str
    address: str
    driver_version: str
    memory_total: int | None = None
    memory_used: int | None = None
    power_limit: float | None = None
    default_power_limit: float | None = None
    max_sm_clock: int | None = None
    memory_clock: int | None = None
    max_memory_clock: int | None = None
    persistence_mode: bool | None = None
    mig: bool | None = None
    compute_mode: str | None = None
    ecc: bool | None = None
    corrected_errors: int | None = None
    uncorrected_errors: int | None = None
    all_uncorrected_errors: int | None = None
    remapped_rows: int | None = None
    remapping_pending: bool | None = None
    remapping_failed: bool | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None
    nvlinks: tuple[float | None, ...] = ()


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Keep NVML open in this context. Raises:   Unavailable, also for NVML's errors within it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise Unavailable(NO_LIBRARY) from error
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML does not start: {error}") from error
    try:
        yield
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML: {error}") from error
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def gpus() -> list[GpuFacts]:
    """Return the facts of every GPU that this process may use.

    Raises:   Unavailable, also if there is none.
    """
    if not (found := _of_each(_facts)):
        raise Unavailable("the driver finds no GPU")
    return found


def loads(ids: Sequence[str] | None = None) -> list[GpuLoad]:
    """Return what GPUs do at this moment.

    Args:     ids: of the GPUs, as in CUDA_VISIBLE_DEVICES; None: all that this process may use.
    Raises:   Unavailable, also if there is no such GPU.
    """
    if ids is None:
        return _of_each(_load)
    with opened():
        handles = [find(name) for name in ids]
        return [_load(pynvml.nvmlDeviceGetIndex(handle), handle) for handle in handles]


def addresses() -> dict[str, str]:
    """Return the UUIDs of the GPUs that this process may use, by PCI address and in its order.

    Raises:   Unavailable.
    """
    return dict(sorted(_of_each(lambda _, gpu: (_address(gpu), pynvml.nvmlDeviceGetUUID(gpu)))))


def links() -> dict[str, dict[str, str]]:
    """Return the connection of each pair of GPUs: {"GPU0": {"GPU1": "NV18"}}.

    "NV18" is 18 NVLinks, directly or through NVSwitch; without any, it is one of PCIE_WAYS. Pairs
    of which the driver knows nothing are left out.

    Raises:   Unavailable.
    """
    with opened():
        ends = _of_each(_Ends.of)
        found = {
            one.name: {
                other.name: way
                for other in ends
                if other is not one and (way := one.way_to(other)) is not None
            }
            for one in ends
        }
    return {name: ways for name, ways in found.items() if ways}


def cuda_of_driver() -> str:
    """Return the newest CUDA version that the driver supports, as "13.0". Raises:   Unavailable."""
    with opened():
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def find(name: str) -> Any:
    """Return NVML's handle of a GPU, to use while NVML is open. For a part of a GPU, the whole GPU.

    Args:     name: an index, or the UUID of a GPU or of a part (MIG).
    Raises:   Unavailable if there is no such GPU.
    """
    try:
        if name.isdecimal():
            return pynvml.nvmlDeviceGetHandleByIndex(int(name))
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        if name.startswith("MIG-"):
            return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return handle
    except pynvml.NVMLError as error:
        raise Unavailable(f"GPU {name}: {error}") from error


def _of_each[T](read: Callable[[int, Any], T]) -> list[T]:
    """Return what is read of each GPU, by its index and handle."""
    found = []
    with opened():
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(read(index, pynvml.nvmlDeviceGetHandleByIndex(index)))
            except pynvml.NVMLError_NoPermission:
                continue  # the job's cgroup forbids it, to CUDA too
            except pynvml.NVMLError as error:
                raise Unavailable(f"GPU {index}: {error}") from error
    return found


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of NVML returns; None if the GPU or its driver does not have it.

    Raises:   pynvml.NVMLError_GpuIsLost.
    """
    try:
        return function(*arguments)
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError:
        return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _is_on(state: int | None) -> bool | None:
    return None if state is None else bool(state)


def _load(index: int, gpu: Any) -> GpuLoad:
    return GpuLoad(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(gpu),
        power_draw=_watts(_ask(pynvml.nvmlDeviceGetPowerUsage, gpu)),
        sm_clock=_ask(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        clock_event_reasons=_ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu),
        temperature=_ask(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
    )


def _facts(index: int, gpu: Any) -> GpuFacts:
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, gpu, pynvml.nvmlMemory_v2)
    mig, _ = _ask(pynvml.nvmlDeviceGetMigMode, gpu) or (None, None)
    ecc, _ = _ask(pynvml.nvmlDeviceGetEccMode, gpu) or (None, None)
    _, rows, pending, failed = _ask(pynvml.nvmlDeviceGetRemappedRows, gpu) or [None] * 4
    fabric = _fabric(gpu)
    completed = fabric is not None and fabric.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return GpuFacts(
        **asdict(_load(index, gpu)),
        name=pynvml.nvmlDeviceGetName(gpu),
        address=_address(gpu),
        driver_version=pynvml.nvmlSystemGetDriverVersion(),
        memory_total=memory and memory.total,
        memory_used=memory and memory.used,
        power_limit=_watts(_ask(pynvml.nvmlDeviceGetPowerManagementLimit, gpu)),
        default_power_limit=_watts(_ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu)),
        max_sm_clock=_ask(pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        memory_clock=_ask(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_MEM),
        max_memory_clock=_ask(pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_MEM),
        persistence_mode=_is_on(_ask(pynvml.nvmlDeviceGetPersistenceMode, gpu)),
        mig=_is_on(mig),
        compute_mode=COMPUTE_MODES.get(_ask(pynvml.nvmlDeviceGetComputeMode, gpu)),
        ecc=_is_on(ecc),
        corrected_errors=_ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *CORRECTED),
        uncorrected_errors=_ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *UNCORRECTED),
        all_uncorrected_errors=_ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *ALL_UNCORRECTED),
        remapped_rows=rows,
        remapping_pending=_is_on(pending),
        remapping_failed=_is_on(failed),
        pcie_generation=_ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu),
        pcie_width=_ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
        max_pcie_width=_ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu),
        fabric_state=FABRIC_STATES.get(fabric.state) if fabric is not None else None,
        fabric_status=_words(fabric.status) if fabric is not None and completed else None,
        nvlinks=_nvlinks(gpu),
    )


def _address(gpu: Any) -> str:
    return _address_in(pynvml.nvmlDeviceGetPciInfo(gpu))


def _address_in(pci: Any) -> str:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _words(status: int) -> str:
    return "Success" if status == pynvml.NVML_SUCCESS else str(pynvml.NVMLError(status))


def _fabric(gpu: Any) -> Any:
    """Return the fabric's fields; None for GPUs and drivers without them."""
    found = pynvml.c_nvmlGpuFabricInfoV_t()
    told = _ask(pynvml.nvmlDeviceGetGpuFabricInfoV, gpu, ctypes.byref(found))
    return None if told is None else found


def _links(gpu: Any) -> dict[int, bool]:
    """Return the numbers of a GPU's NVLinks, and whether each is active."""
    states = {
        link: _ask(pynvml.nvmlDeviceGetNvLinkState, gpu, link)
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    }
    return {link: bool(state) for link, state in states.items() if state is not None}


def _nvlinks(gpu: Any) -> tuple[float | None, ...]:
    """Return the speed of each NVLink. GPUs before Hopper have one speed for all."""
    return tuple(_speed(gpu, link) if active else None for link, active in _links(gpu).items())


def _speed(gpu: Any, link: int) -> float:
    own = (pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)
    common = (pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0)
    for field in _ask(pynvml.nvmlDeviceGetFieldValues, gpu, [own, common]) or ():
        if field.nvmlReturn == pynvml.NVML_SUCCESS and field.value.uiVal:
            return field.value.uiVal / 1000
    return 0.0


@dataclass(frozen=True)
class _Ends:
    """Where the active NVLinks of a GPU lead.

    peers      PCI addresses at the other ends. switched   how many links lead to NVSwitch: not to a
               device that the driver knows as another kind. A virtual machine may hide the switch.
    fabric     its cluster and clique: GPUs of one reach each other through the switches.
    """

    name: str
    gpu: Any
    address: str
    peers: tuple[str, ...]
    switched: int
    fabric: tuple[bytes, int] | None

    @staticmethod
    def of(index: int, gpu: Any) -> "_Ends":
        active = [link for link, up in _links(gpu).items() if up]
        kinds = [_ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, gpu, link) for link in active]
        peers = [_ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, gpu, link) for link in active]
        fabric = _fabric(gpu)
        return _Ends(
            name=f"GPU{index}",
            gpu=gpu,
            address=_address(gpu),
            peers=tuple(_address_in(peer) for peer in peers if peer is not None),
            switched=sum(kind not in NOT_SWITCHES for kind in kinds),
            fabric=None if fabric is None else (bytes(fabric.clusterUuid), fabric.cliqueId),
        )

    def way_to(self, other: "_Ends") -> str | None:
        count = self.peers.count(other.address)
        if not count and self.fabric == other.fabric:
            count = min(self.switched, other.switched)
        if count:
            return f"NV{count}"
        way = _ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, self.gpu, other.gpu)
        return PCIE_WAYS.get(way)
