"""The piece server of a host, and the folder that a launcher keeps."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxpar.config import Config, ConfigError, replace
from jaxpar.memory_checkpoint import client
from jaxpar.memory_checkpoint import server as server_module
from jaxpar.memory_checkpoint.client import (
    LIMITS_FILE,
    Answer,
    Greeting,
    HostLost,
    PieceClient,
    PieceRequest,
)
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
from jaxpar.runtime.processes.token import TOKEN_FILE, RunToken
from tests.memory_checkpoint.hosts import TOKEN, accept
from tests.ranks import alive, wait_for

ON = replace(Config(), **{"checkpoint.memory.every": 5})
NAME = PieceFile(Group(30, "0123abcd", 2), 7, False)


@pytest.fixture
def folder(tmp_path) -> Path:
    for kind in (OWN, MIRRORED):
        (tmp_path / kind).mkdir()
    accept(tmp_path, NAME.group.session)
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
    with PieceServer(folder, "127.0.0.1", TOKEN) as server:
        address = f"127.0.0.1:{server.port}"
        with PieceClient(address, TOKEN) as client:
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
        with PieceClient(address, TOKEN) as client:
            assert client.files() == {str(NAME): len(content)}
        child = server._child.pid
    assert not alive(child)


@pytest.mark.waits
def test_what_a_host_refuses(folder, tmp_path):
    with PieceServer(folder, "127.0.0.1", TOKEN) as server:
        address = f"127.0.0.1:{server.port}"
        wrong = tmp_path / "passwd"
        wrong.write_bytes(b"x")
        with (
            PieceClient(address, TOKEN) as client,
            pytest.raises(HostLost, match="not the name of a"),
        ):
            client.write(wrong)
        for name in (str(NAME), "../lock"):
            with (
                PieceClient(address, TOKEN) as client,
                pytest.raises(HostLost, match="there is no"),
            ):
                client.read(name, 0, memoryview(bytearray(1)))
        (folder / OWN / str(NAME)).write_bytes(b"abc")
        with PieceClient(address, TOKEN) as client, pytest.raises(HostLost, match="no such bytes"):
            client.read(str(NAME), 2, memoryview(bytearray(2)))
        # A connection that ends within a file leaves nothing.
        with PieceClient(address, TOKEN) as cut:
            cut._ask(PieceRequest(do="write", name=str(NAME), size=1000))
            cut._socket.sendall(b"x" * 999)
        with PieceClient(address, TOKEN) as client:
            assert client.files() == {str(NAME): 3}
        wait_for(lambda: not list((folder / MIRRORED).iterdir()))
    with pytest.raises(HostLost, match=r"127.0.0.1:1: .*refused"):
        PieceClient("127.0.0.1:1", TOKEN)


def test_no_room_is_said_before_anything_is_sent(folder, tmp_path):
    sent = tmp_path / str(NAME)
    with open(sent, "wb") as file:
        file.truncate(1 << 50)  # sparse
    with PieceServer(folder, "127.0.0.1", TOKEN) as server:
        with (
            PieceClient(f"127.0.0.1:{server.port}", TOKEN) as client,
            pytest.raises(HostLost) as error,
        ):
            client.write(sent)
        assert "No space left" in str(error.value) or "too large" in str(error.value)
        assert not list((folder / MIRRORED).iterdir())


STRANGE = (
    b'{"do": "list"}\n',
    f'{{"do": "read", "name": "{NAME}", "begin": 0, "size": 3}}\n'.encode(),
    f'{{"do": "write", "name": "{NAME}", "size": 4000000}}\n'.encode(),
    b"[" * 100_000 + b"\n",
    b"\0" * 2_000_000,
    b"\xff\xfe\n",
    b"null\n",
    b"\n",
    b'{"nonce": 1, "signature": true}\n',
    b'{"nonce": "' + b"0" * 32 + b'", "signature": "' + b"0" * 64 + b'"}\n',
)


def test_a_stranger_gets_nothing_and_takes_no_memory(folder, capfd):
    # No hexadecimal digits, of which the server's greeting has 32 at random.
    (folder / OWN / str(NAME)).write_bytes(b"xyz")
    with PieceServer(folder, "127.0.0.1", TOKEN) as server:
        for said in STRANGE:
            with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
                with contextlib.suppress(OSError):  # closed while it still sends
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                answer = b""
                with contextlib.suppress(OSError):
                    while got := stranger.recv(1 << 16):
                        answer += got
                assert b"xyz" not in answer and str(NAME).encode() not in answer
                assert len(answer) < 500
        assert not list((folder / MIRRORED).iterdir())
        with pytest.raises(HostLost, match=f"does not have this run's token.*{TOKEN_FILE}"):
            PieceClient(f"127.0.0.1:{server.port}", RunToken("the token of another run"))
        with PieceClient(f"127.0.0.1:{server.port}", TOKEN) as client:
            assert client.files() == {str(NAME): 3}
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.waits
def test_a_server_without_the_token_receives_nothing():
    with socket.create_server(("127.0.0.1", 0)) as false:
        received = b""

        def serve() -> None:
            nonlocal received
            connection, _ = false.accept()
            with connection:
                connection.sendall(client.line(Greeting(nonce="0" * 32)))
                received = connection.recv(1000)
                connection.sendall(client.line(Answer(signature="0" * 64)))
                received += connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HostLost, match="does not have this run's token"):
            PieceClient(f"127.0.0.1:{false.getsockname()[1]}", TOKEN)
        thread.join()
    assert received.count(b"\n") == 1 and TOKEN.secret.encode() not in received


def test_a_host_takes_only_what_its_run_has_planned(folder):
    accept(folder, "0123abcd", size=1000, steps=100)
    too_much, other = "more than the run has planned", "not of this run's copies"
    with PieceServer(folder, "127.0.0.1", TOKEN) as server:
        for name, size, why in (
            (NAME, 1001, too_much),
            (NAME, 1 << 61, too_much),
            (NAME._replace(group=Group(30, "deadbeef", 2)), 10, other),
            (NAME._replace(group=Group(101, "0123abcd", 2)), 10, other),
        ):
            with PieceClient(f"127.0.0.1:{server.port}", TOKEN) as client:
                with pytest.raises(HostLost, match=why):
                    client._ask(PieceRequest(do="write", name=str(name), size=size))
                client.files()  # the conversation goes on
        assert not list((folder / MIRRORED).iterdir())


def test_a_host_takes_nothing_before_its_run_has_planned_or_beyond(folder, tmp_path):
    sent = tmp_path / str(NAME)
    sent.write_bytes(b"x" * 1000)
    (folder / LIMITS_FILE).unlink()
    with PieceServer(folder, "127.0.0.1", TOKEN) as server:
        with PieceClient(f"127.0.0.1:{server.port}", TOKEN) as client:
            with pytest.raises(HostLost, match="expects pieces"):
                client.write(sent)
            accept(folder, "0123abcd", size=1000)  # so twice that in all
            client.write(sent)
            client.write(sent.rename(tmp_path / str(NAME._replace(process=8))))
            last = (tmp_path / str(NAME._replace(process=8))).rename(
                tmp_path / str(NAME._replace(process=9))
            )
            with pytest.raises(HostLost, match="more than the run has planned"):
                client.write(last)
        assert len(list((folder / MIRRORED).iterdir())) == 2


@pytest.mark.waits
def test_strangers_hold_no_connections(folder, monkeypatch):
    monkeypatch.setattr(server_module, "PROOF_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 4)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listener = server_module._Listener(folder, os.dup(listening.fileno()), TOKEN)
        threading.Thread(target=listener.serve_forever, args=(0.01,)).start()
        address = listening.getsockname()
        try:
            strangers = [socket.create_connection(address, 10) for _ in range(20)]
            with PieceClient(f"127.0.0.1:{address[1]}", TOKEN) as client:
                assert client.files() == {}
                for one in strangers:  # all are ended, those that waited after PROOF_SECONDS
                    with one:
                        while one.recv(1000):
                            pass
                wait_for(lambda: listener._peers == 1 and not listener._strangers, 10)
                assert client.files() == {}
            wait_for(lambda: not listener._peers, 10)
        finally:
            listener.shutdown()
            listener.server_close()


KILLED_LAUNCHER = """
import os, signal
from jaxpar.config import Config, replace
from jaxpar.memory_checkpoint.places import kept_in_memory
with kept_in_memory(replace(Config(), **{"checkpoint.memory.every": 5})):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_keeps_a_folder_and_deletes_those_of_killed_ones(tmp_path):
    env = {FOLDER: str(tmp_path)}
    with kept_in_memory(Config(), env) as memory:
        assert memory is None
    with kept_in_memory(ON, env) as memory:
        assert memory is not None
        place = place_of(ON, memory.variables(["a:1", "b:2"], 1) | TOKEN.environment())
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
        (): "checkpoint.memory.every = 5: needs a launcher.*jaxpar.launch -n 1",
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
