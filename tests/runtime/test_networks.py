"""The network between hosts: what is detected from the kernel's files, and what is set for it."""

import pytest

from jaxpar.config import ConfigError, flag
from jaxpar.config.schema import ClusterConfig
from jaxpar.runtime.processes import peers
from jaxpar.runtime.processes.networks import choosing
from jaxpar.runtime.processes.networks.host import interface_towards, rdma_ports, read
from jaxpar.runtime.processes.networks.variables import VARIABLES
from tests.runtime.kernel_files import interface, rdma, routes, write

COORDINATOR = "10.1.0.7"


@pytest.fixture
def root(tmp_path):
    """A host with one interface to the others, a storage network, and a bridge."""
    interface(tmp_path, "lo", virtual=True, up="unknown")
    interface(tmp_path, "eth0", 100_000)
    interface(tmp_path, "eth1", 25_000)
    interface(tmp_path, "eth9", up="down")
    interface(tmp_path, "virbr0", virtual=True)
    found = {"0.0.0.0/0": "eth1", "10.1.0.0/16": "eth0", "192.168.122.0/24": "virbr0"}
    routes(tmp_path, found | {"fd00:1::/64": "eth0", "::/0": "eth1", "fe80::/64": "virbr0"})
    return tmp_path


def settled(root, asked="auto", **env):
    return choosing.settle(asked, COORDINATOR, env, root), env


def test_a_host_without_rdma_uses_tcp(root):
    found, env = settled(root)
    assert found.network == "tcp" and "eth0, eth1" in found.why
    assert env == {"NCCL_SOCKET_IFNAME": "=eth0,eth1"}
    assert [name for name, *_ in found.suggested] == [
        "NCCL_SOCKET_NTHREADS",
        "NCCL_NSOCKS_PERTHREAD",
    ]
    assert found.lines()[0].endswith("; set NCCL_SOCKET_IFNAME==eth0,eth1")


def test_slow_interfaces_need_no_threads(root):
    write(root / "sys/class/net/eth0/speed", "25000")
    assert settled(root)[0].suggested == []


def test_a_container_has_one_interface_and_no_choice(tmp_path):
    interface(tmp_path, "eth0", virtual=True)
    routes(tmp_path, {"0.0.0.0/0": "eth0"})
    found, env = settled(tmp_path)
    assert found.network == "tcp" and env == {} and found.why.endswith("eth0")


def test_a_bond_carries_and_its_devices_do_not(root):
    interface(root, "bond0", virtual=True)
    routes(root, {"0.0.0.0/0": "bond0"})
    assert settled(root)[1] == {"NCCL_SOCKET_IFNAME": "=bond0"}


def test_infiniband(root):
    for i in range(8):
        rdma(root, f"mlx5_{i}")
    rdma(root, "mlx5_8", state="1: DOWN")
    found, env = settled(root)
    assert found.network == "ib"
    assert found.why == "8 active ports of InfiniBand, 400 Gb/sec (4X NDR)"
    assert env == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert [pair[:2] for pair in found.suggested] == [("NCCL_CROSS_NIC", "0")]


def test_a_container_without_its_hosts_cards(root):
    rdma(root, "mlx5_0")
    (root / "dev/infiniband/uverbs_mlx5_0").unlink()
    found, _ = settled(root)
    assert found.network == "tcp"
    assert found.why == "RDMA cards that cannot be opened, without /dev/infiniband; eth0, eth1"
    with pytest.raises(ConfigError, match="no active port"):
        settled(root, "ib")


def test_infiniband_beside_ethernet_names_its_ports(root):
    rdma(root, "mlx5_0")
    rdma(root, "mlx5_1", "Ethernet")
    assert settled(root)[1]["NCCL_IB_HCA"] == "=mlx5_0:1"
    found, env = settled(root, "roce")
    assert found.network == "roce" and env["NCCL_IB_HCA"] == "=mlx5_1:1"
    assert found.why.startswith("as cluster.network says, 1 active port of RDMA over Ethernet")


def test_roce_is_told_of_traffic_classes(root):
    rdma(root, "mlx5_0", "Ethernet")
    found, env = settled(root)
    assert found.network == "roce" and set(env) == {"NCCL_SOCKET_IFNAME"}
    assert "NCCL_IB_TC" in [name for name, *_ in found.suggested]


def test_what_the_user_has_set_stays(root):
    rdma(root, "mlx5_0", "Ethernet")
    found, env = settled(root, NCCL_SOCKET_IFNAME="eth1", NCCL_IB_TC="41")
    assert env == {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_IB_TC": "41"}
    assert found.to_set == {} and found.kept == env
    assert "kept NCCL_SOCKET_IFNAME=eth1 NCCL_IB_TC=41" in found.lines()[0]
    assert "NCCL_IB_TC" not in found.lines()[1]


def test_elastic_fabric_adapters_need_their_plugin(root):
    rdma(root, "rdmap16s27", "Unspecified", driver="efa", rate="100 Gb/sec")
    found, env = settled(root)
    assert found.network == "efa"
    assert env == {"NCCL_SOCKET_IFNAME": "=eth0", "FI_EFA_USE_HUGE_PAGE": "0"}
    assert found.suggested[-1][:2] == ("LD_LIBRARY_PATH", "FOLDER_OF_THE_PLUGIN:$LD_LIBRARY_PATH")
    folder = "opt/amazon/ofi-nccl/lib"
    write(root / folder / "libnccl-net.so", "")
    found, _ = settled(root, LD_LIBRARY_PATH="/usr/lib")
    assert found.suggested[-1][1] == f"/{folder}:$LD_LIBRARY_PATH"
    assert settled(root, LD_LIBRARY_PATH=f"/usr/lib:/{folder}")[0].suggested == []
    write(root / "etc/ld.so.conf.d/ofi.conf", f"# AWS\n/{folder}")
    assert settled(root)[0].suggested == []


def test_google_clouds_plugins(root):
    write(root / "usr/local/tcpx/lib64/libnccl-net.so", "")
    found, env = settled(root)
    told = {name: value for name, value, *_ in found.suggested}
    assert found.network == "tcpx" and env == {}
    assert told["NCCL_GPUDIRECTTCPX_CTRL_DEV"] == told["NCCL_SOCKET_IFNAME"] == "eth0"
    assert told["NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"] == "eth1"
    write(root / "var/lib/tcpxo/lib64/libnccl-net.so.0", "")
    found, env = settled(root)
    assert found.network == "tcpxo" and env == {}
    assert "NCCL_FASTRAK_CTRL_DEV" in dict(pair[:2] for pair in found.suggested)
    write(root / "usr/local/gib/lib64/libnccl-net_internal.so", "")
    assert settled(root)[0].network == "tcpxo"  # gIB is for cards of RDMA
    rdma(root, "mlx5_0", "Ethernet")
    found, env = settled(root)
    assert found.network == "gib" and env == {}
    assert found.suggested[0][:2] == ("NCCL_NET", "gIB")


@pytest.mark.parametrize("network", ["ib", "roce", "efa"])
def test_a_network_that_is_not_there_is_refused(root, network):
    rdma(root, "mlx5_0", state="1: DOWN")
    with pytest.raises(ConfigError, match=rf"no active port.*tcp(.|\n)*{flag('cluster.network')}"):
        settled(root, network)


def test_a_plugin_may_be_where_nobody_looks(root):
    found, _ = settled(root, "tcpxo")
    assert found.network == "tcpxo" and found.why == "as cluster.network says"


def test_the_interface_of_the_longest_prefix(root):
    control = lambda host: read(host, {}, root).control  # noqa: E731
    assert control("10.1.2.3") == "eth0" and control("10.2.2.3") == "eth1"
    assert control("fd00:1::5") == "eth0" and control("fd00:2::5") == "eth1"
    assert control("127.0.1.1") == "eth1"  # process 0's own name: the default route
    assert interface_towards(["10.1.2.3"], []) == ""


def test_rdma_ports(tmp_path):
    rdma(tmp_path, "mlx5_0")
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/link_layer").unlink()
    port = {"card": "mlx5_0", "port": "1", "driver": "mlx5_core", "state": "4: ACTIVE"}
    expected = port | {"rate": "400 Gb/sec (4X NDR)", "link_layer": ""}
    assert rdma_ports(tmp_path / "sys/class/infiniband") == [expected]
    assert rdma_ports(tmp_path / "none") == []


def test_the_table_has_sources_and_never_names_multicast():
    choices = ClusterConfig.__annotations__["network"].__args__
    assert set(VARIABLES) == set(choices) - {"auto", "none"}
    for row in (row for rows in VARIABLES.values() for row in rows):
        assert row.source.startswith("https://") and row.why
        assert "NVLS" not in row.name and "MULTICAST" not in row.name
        assert not row.is_set or row.name != "LD_LIBRARY_PATH"  # too late in this process


def test_hosts_that_differ_are_named():
    assert list(choosing.differing(["ib", "ib"], ["a", "b"])) == []
    (told,) = choosing.differing(["ib", "tcp", "tcp"], ["a", "b", "b"])
    assert "ib in a and tcp in b" in told


@pytest.fixture
def two_hosts(monkeypatch, root):
    """Two connected processes on hosts of their own; what the console says."""
    monkeypatch.setattr(peers, "hosts", ["a", "b"])
    monkeypatch.setattr(peers, "exchange", lambda name, text, seconds: [text, text])
    env = {}
    settle = choosing.settle
    monkeypatch.setattr(choosing, "settle", lambda *where: settle(*where, env, root))
    told = []

    def run(asked):
        told.clear()
        env.clear()
        assert choosing.between_hosts(asked, COORDINATOR, 1, told.append) == [
            f"{name}={value}" for name, value in env.items()
        ]
        return env, told

    return run


def test_several_hosts_report_what_they_set(two_hosts):
    env, told = two_hosts("tcp")
    assert env == {"NCCL_SOCKET_IFNAME": "=eth0,eth1"}
    assert told[0] == "network    tcp: as cluster.network says; set NCCL_SOCKET_IFNAME==eth0,eth1"
    assert told[1].startswith("network    consider NCCL_SOCKET_NTHREADS=4 ")


def test_nothing_is_set_if_none_is_asked_for_or_there_is_one_host(two_hosts, monkeypatch):
    assert two_hosts("none") == ({}, [])
    monkeypatch.setattr(peers, "hosts", ["a", "a"])
    assert two_hosts("tcp") == ({}, [])


def test_auto_is_for_gpus(two_hosts, monkeypatch):
    for present in False, True:
        monkeypatch.setattr(choosing, "gpu_is_present", lambda present=present: present)
        env, told = two_hosts("auto")
        assert bool(env) == bool(told) == present
