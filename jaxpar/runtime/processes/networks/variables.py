"""Variables of NCCL and its plugins by network, as data with sources.

jaxpar sets the few that are safe on every host of that network (`is_set`), where the user has not.
The others depend on the switches or on versions: they are shown. None concerns NVLink multicast.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxpar.runtime.processes.networks.host import HostNetwork


def always(host: HostNetwork) -> bool:
    """Every host."""
    return True


def with_choice(host: HostNetwork) -> bool:
    """Hosts with several interfaces."""
    return bool(host.control) and len(host.interfaces) > 1


def with_both_layers(host: HostNetwork) -> bool:
    """Hosts with ports of both kinds, InfiniBand and Ethernet."""
    return bool(host.active("InfiniBand") and host.active("Ethernet"))


def with_several_cards(host: HostNetwork) -> bool:
    """Hosts with several RDMA cards."""
    return len({port["card"] for port in host.ports}) > 1


def with_fast_interface(host: HostNetwork) -> bool:
    """Hosts with an interface of 100 Gbit/s or more."""
    return any(i.speed >= 100_000 for i in host.interfaces if i.name in host.carriers)


def unloadable(network: str) -> Callable[[HostNetwork], bool]:
    """Return the condition that the dynamic loader does not find the network's plugin."""

    def where(host: HostNetwork) -> bool:
        return network not in host.loadable

    where.__doc__ = "Hosts on which the dynamic loader does not find the plugin."
    return where


@dataclass(frozen=True, kw_only=True)
class NetworkVariable:
    """A variable for a network.

    value    may contain names of this host: {control}, {carriers}, {data}, {infiniband},
             {ethernet} and {plugin}.
    is_set   whether jaxpar sets it. Otherwise it is shown.
    """

    name: str
    value: str
    why: str
    source: str
    is_set: bool = False
    where: Callable[[HostNetwork], bool] = always


NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
EFA = (
    "https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/"
    "efa-cheatsheet.md"
)
EFA_START = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html"
_GKE = "https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob/master/"
TCPX, TCPXO = (_GKE + f"gpudirect-{name}/nccl-test-latest.yaml" for name in ("tcpx", "tcpxo"))
TOOLKIT = (
    "https://github.com/GoogleCloudPlatform/cluster-toolkit/tree/main/examples/machine-learning"
)
GIB = "https://docs.cloud.google.com/ai-hypercomputer/docs/nccl/overview"

_BOOTSTRAP = NetworkVariable(
    name="NCCL_SOCKET_IFNAME",
    value="={control}",
    why="NCCL connects first over TCP, and may choose a bridge that other hosts cannot reach",
    source=NCCL,
    is_set=True,
    where=with_choice,
)
_RAILS = NetworkVariable(
    name="NCCL_CROSS_NIC",
    value="0",
    why="if each card has its own switch (rails), traffic between rails is slow",
    source=NCCL,
    where=with_several_cards,
)


def _control(source: str) -> NetworkVariable:
    return NetworkVariable(
        name="NCCL_SOCKET_IFNAME",
        value="{control}",
        why="the interface of the host; the GPUs' interfaces are the plugin's",
        source=source,
    )


def _path(network: str, source: str) -> NetworkVariable:
    return NetworkVariable(
        name="LD_LIBRARY_PATH",
        value="{plugin}:$LD_LIBRARY_PATH",
        why="NCCL loads its plugin from there; without it, it uses TCP. Set it before the start",
        source=source,
        where=unloadable(network),
    )


#: The variables of each network that `cluster.network` names.
VARIABLES: dict[str, tuple[NetworkVariable, ...]] = {
    "ib": (
        _BOOTSTRAP,
        NetworkVariable(
            name="NCCL_IB_HCA",
            value="={infiniband}",
            why="a port of InfiniBand cannot talk to one of Ethernet",
            source=NCCL,
            is_set=True,
            where=with_both_layers,
        ),
        _RAILS,
    ),
    "roce": (
        _BOOTSTRAP,
        NetworkVariable(
            name="NCCL_IB_HCA",
            value="={ethernet}",
            why="a port of Ethernet cannot talk to one of InfiniBand",
            source=NCCL,
            is_set=True,
            where=with_both_layers,
        ),
        NetworkVariable(
            name="NCCL_IB_TC",
            value="106",
            why="the traffic class that the switches do not drop; 106 is DSCP 26, a common choice. "
            "Ask the network's operator",
            source=NCCL,
        ),
        NetworkVariable(
            name="NCCL_IB_QPS_PER_CONNECTION",
            value="4",
            why="spreads a connection over several paths, if switches choose paths by hash",
            source=NCCL,
        ),
        _RAILS,
    ),
    "gib": (
        NetworkVariable(
            name="NCCL_NET",
            value="gIB",
            why="NCCL fails without the plugin, rather than use slower RoCE. "
            "/usr/local/gib/scripts/set_nccl_env.sh sets the plugin's other variables",
            source=GIB,
        ),
        _path("gib", GIB),
    ),
    "efa": (
        _BOOTSTRAP,
        NetworkVariable(
            name="FI_EFA_USE_HUGE_PAGE",
            value="0",
            why="with huge pages, starting a data worker may fail with 'Cannot allocate memory'",
            source=EFA,
            is_set=True,
        ),
        _path("efa", EFA_START),
    ),
    "tcpxo": (
        _control(TCPXO),
        NetworkVariable(
            name="NCCL_FASTRAK_CTRL_DEV",
            value="{control}",
            why="the interface of the plugin's control messages",
            source=TCPXO,
        ),
        NetworkVariable(
            name="NCCL_FASTRAK_IFNAME",
            value="{data}",
            why="the GPUs' interfaces. nccl-env-profile.sh beside the plugin sets the other "
            "variables; the plugin refuses other values",
            source=TCPXO,
        ),
        NetworkVariable(
            name="NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY",
            value="/dev/aperture_devices",
            why="the devices of low-latency messages",
            source=TOOLKIT,
        ),
        _path("tcpxo", TCPXO),
    ),
    "tcpx": (
        _control(TCPX),
        NetworkVariable(
            name="NCCL_GPUDIRECTTCPX_CTRL_DEV",
            value="{control}",
            why="the interface of the plugin's control messages",
            source=TCPX,
        ),
        NetworkVariable(
            name="NCCL_GPUDIRECTTCPX_SOCKET_IFNAME",
            value="{data}",
            why="the GPUs' interfaces",
            source=TCPX,
        ),
        NetworkVariable(
            name="NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX",
            value="/run/tcpx",
            why="the socket of the receive manager, which must run on each host",
            source=TCPX,
        ),
        NetworkVariable(
            name="NCCL_CROSS_NIC",
            value="0",
            why="each card has its own network",
            source=TCPX,
        ),
        _path("tcpx", TCPX),
    ),
    "tcp": (
        NetworkVariable(
            name="NCCL_SOCKET_IFNAME",
            value="={carriers}",
            why="NCCL may choose a bridge or tunnel that other hosts cannot reach",
            source=NCCL,
            is_set=True,
            where=with_choice,
        ),
        NetworkVariable(
            name="NCCL_SOCKET_NTHREADS",
            value="4",
            why="one connection does not fill 100 Gbit/s",
            source=NCCL,
            where=with_fast_interface,
        ),
        NetworkVariable(
            name="NCCL_NSOCKS_PERTHREAD",
            value="4",
            why="one connection does not fill 100 Gbit/s",
            source=NCCL,
            where=with_fast_interface,
        ),
    ),
}
