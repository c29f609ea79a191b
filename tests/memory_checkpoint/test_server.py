"""The piece server of a host, and the folder that a launcher keeps."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.memory_checkpoint.client import HostLost, PieceClient
from jaxpar.memory_checkpoint.places import (
    FOLDER,
    HOST,
    MIRRORED,
    OWN,
    PEERS,
    Group,
    HostMemory,
    PieceFile,
    complete_files,
    kept_in_memory,
    place_of,
    read_name,
)
from jaxpar.memory_checkpoint.server import PieceServer
from tests.ranks import alive, wait_for

ON = replace(Config(), **{"checkpoint.memory_every": 5})
NAME = PieceFile(Group(30, "0123abcd", 2), 7, False)


@pytest.fixture
def folder(tmp_path) -> Path:
    for kind in (OWN, MIRRORED):
        (tmp_path / kind).mkdir()
    return tmp_path


def test_names_say_what_a_file_holds():
    for shared in (False, True):
        assert read_name(str(NAME._replace(shared=shared))) == NAME._replace(shared=shared)
    assert str(NAME) == "step_0000000030.0123abcd.2.7.single"
    for other in (f".{NAME}", f"{NAME}/..", "../lock", str(NAME).replace("2.7", "2.x")):
        assert read_name(other) is None


def test_a_host_takes_a_file_and_gives_it_back(folder, tmp_path):
    content = os.urandom(3_000_017)
    sent = tmp_path / str(NAME)
    sent.write_bytes(content)
    with PieceServer(folder, "127.0.0.1") as server:
        address = f"127.0.0.1:{server.port}"
        with PieceClient(address) as client:
            assert client.files() == {}
            client.write(sent)
            assert client.files() == {str(NAME): len(content)}
            part = bytearray(1_000_000)
            client.read(str(NAME), 2_000_017, memoryview(part))
            assert part == content[2_000_017:]
        assert (folder / MIRRORED / str(NAME)).read_bytes() == content
        assert complete_files(folder) == {NAME: [folder / MIRRORED / str(NAME)]}
        assert HostMemory(folder).newest_step() == 30
        # It ends with its parent, or is started again on the same port.
        assert server._child is not None
        server._child.kill()
        server._child.wait()
        server.ensure()
        with PieceClient(address) as client:
            assert client.files() == {str(NAME): len(content)}
        child = server._child.pid
    assert not alive(child)


@pytest.mark.waits
def test_what_a_host_refuses(folder, tmp_path):
    with PieceServer(folder, "127.0.0.1") as server:
        address = f"127.0.0.1:{server.port}"
        wrong = tmp_path / "passwd"
        wrong.write_bytes(b"x")
        with PieceClient(address) as client, pytest.raises(HostLost, match="not the name of a"):
            client.write(wrong)
        for name in (str(NAME), "../lock"):
            with PieceClient(address) as client, pytest.raises(HostLost, match="there is no"):
                client.read(name, 0, memoryview(bytearray(1)))
        (folder / OWN / str(NAME)).write_bytes(b"abc")
        with PieceClient(address) as client, pytest.raises(HostLost, match="no such bytes"):
            client.read(str(NAME), 2, memoryview(bytearray(2)))
        # A connection that ends within a file leaves nothing.
        with socket.create_connection(("127.0.0.1", server.port)) as cut:
            cut.sendall(f'{{"do": "write", "name": "{NAME}", "size": 1000}}\n'.encode())
            assert cut.recv(100) == b'{"ready": true}\n'
            cut.sendall(b"x" * 999)
        with PieceClient(address) as client:
            assert client.files() == {str(NAME): 3}
        wait_for(lambda: not list((folder / MIRRORED).iterdir()))
    with pytest.raises(HostLost, match=r"127.0.0.1:1: .*refused"):
        PieceClient("127.0.0.1:1")


def test_no_room_is_said_before_anything_is_sent(folder, tmp_path):
    sent = tmp_path / str(NAME)
    with open(sent, "wb") as file:
        file.truncate(1 << 50)  # sparse
    with PieceServer(folder, "127.0.0.1") as server:
        with PieceClient(f"127.0.0.1:{server.port}") as client, pytest.raises(HostLost) as error:
            client.write(sent)
        assert "No space left" in str(error.value) or "too large" in str(error.value)
        assert not list((folder / MIRRORED).iterdir())


KILLED_LAUNCHER = """
import os, signal
from jaxpar.config import Config, replace
from jaxpar.memory_checkpoint.places import kept_in_memory
with kept_in_memory(replace(Config(), **{"checkpoint.memory_every": 5})):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_keeps_a_folder_and_deletes_those_of_killed_ones(tmp_path):
    env = {FOLDER: str(tmp_path)}
    with kept_in_memory(Config(), env) as memory:
        assert memory is None
    with kept_in_memory(ON, env) as memory:
        assert memory is not None
        place = place_of(ON, memory.environment(["a:1", "b:2"], 1))
        assert place is not None and (place.folder, place.host) == (memory.folder, 1)
        assert place.peers == ("a:1", "b:2") and place.num_hosts == 2
        killed = [sys.executable, "-c", KILLED_LAUNCHER]
        assert subprocess.run(killed, env=os.environ | env).returncode == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 2
        with kept_in_memory(ON, env) as other:
            assert other is not None
            assert {*tmp_path.iterdir()} == {memory.folder, other.folder}
    assert not list(tmp_path.iterdir())


def test_copies_need_a_launcher_and_a_place(tmp_path):
    assert place_of(Config(), {}) is None
    for env, said in {
        (): "checkpoint.memory_every = 5: needs a launcher.*jaxpar.launch -n 1",
        ((FOLDER, "/nowhere"),): "JAXPAR_MEMORY_FOLDER = '/nowhere': is not a folder",
        ((FOLDER, str(tmp_path)), (PEERS, "a:1,b:2"), (HOST, "2")): "not the index of one of 2",
    }.items():
        with pytest.raises(ConfigError, match=said):
            place_of(ON, dict(env))
    file = tmp_path / "file"
    file.touch()
    said = pytest.raises(ConfigError, match="set JAXPAR_MEMORY_FOLDER to a folder on a file system")
    with said, kept_in_memory(ON, {FOLDER: str(file)}):
        pass
